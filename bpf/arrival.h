/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* An arrival: a rank enters a collective; the record includes the process's time ledger. Also communicators and their
 * round counts. */
#ifndef STALLSCOPE_ARRIVAL_H
#define STALLSCOPE_ARRIVAL_H

#include "probe.h"

#define N_COMMS 4096
#define N_PEERS 16384

struct comm_key {
	u64 comm;
	u32 tgid;
	u32 spare;
};

struct comm {
	u64 hash;
	s64 born_ns;
	s64 seq;
	s32 rank;
	s32 nranks;
	s32 device;
	s32 n_splits; /* children so far, by the call that made them: not all ranks take part in each */
	s32 n_shrinks;
	s32 n_grows;
	u32 flags;
	u32 spare;
};

struct peer_key {
	u64 comm;
	s64 born_ns; /* of the communicator: a handle may be used again */
	u32 tgid;
	s32 peer;
	u32 op;
	u32 spare;
};

struct held { /* a call inside a group */
	u64 comm_hash;
	u64 comm;
	s64 seq;
	s64 count;
	u64 stream;
	s32 comm_rank;
	s32 nranks;
	s32 peer_rank;
	s32 device;
	u32 flags;
	u16 op;
	u8 datatype;
	u8 reduce_op;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_COMMS);
	__type(key, struct comm_key);
	__type(value, struct comm);
} comms __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_PEERS);
	__type(key, struct peer_key);
	__type(value, s64);
} peers __weak SEC(".maps");

/* ---- arrivals ---- */

INLINE u64 mixed(u64 hash, u64 word)
{
	hash = (hash ^ word) * 0x100000001b3ULL; /* FNV-1a, a word at a time; the shift brings high bits down */
	return hash ^ hash >> 29;
}

#define HASH_BASIS 0xcbf29ce484222325ULL

/* The communicator's entry; made here for one from before the attach. */
INLINE struct comm *comm_of(struct comm_key *key)
{
	struct comm *comm = bpf_map_lookup_elem(&comms, key);
	struct comm made = { .rank = -1, .nranks = -1, .device = -1, .flags = COLLECTIVE_LATE_ATTACH };

	if (comm)
		return comm;
	made.born_ns = bpf_ktime_get_ns();
	bpf_map_update_elem(&comms, key, &made, BPF_NOEXIST);
	comm = bpf_map_lookup_elem(&comms, key);
	if (!comm)
		count(LOST_COMM);
	return comm;
}

static long forget_if_of_process(void *map, struct comm_key *key, struct comm *comm, u32 *tgid)
{
	if (key->tgid == *tgid)
		bpf_map_delete_elem(map, key);
	return 0;
}

/* A process has ended, or has become another program: its handles are invalid, and its number may be reused. */
INLINE void forget_comms(u32 tgid)
{
	bpf_for_each_map_elem(&comms, forget_if_of_process, &tgid, 0);
}

INLINE bool is_peer_call(u32 op)
{
	return op == OP_SEND || op == OP_RECV;
}

/* The sequence number of the next of n calls between two ranks; -1 without room to count. */
INLINE s64 next_to_peer(const struct comm_key *comm_key, const struct comm *comm, u32 op, s32 peer, s64 n)
{
	struct peer_key key = { .comm = comm_key->comm, .tgid = comm_key->tgid, .peer = peer, .op = op };
	s64 zero = 0, *seq;

	key.born_ns = comm->born_ns;
	seq = entry_of(&peers, &key, &zero);
	return seq ? __sync_fetch_and_add(seq, n) : -1;
}

/* A half-done change, by a thread that lost the CPU in the middle of it, leaves two accounts wrong by its time stamp:
 * one is negative, the other exceeds the process's age. With now in place of that stamp, they are wrong by at most the
 * time for which the change has been waiting. */
INLINE void mend(struct arrival *a, s64 born_ns)
{
	s64 age = a->ts_ns - born_ns;

#pragma unroll
	for (int c = 0; c < N_CATEGORIES; c++) {
		if (a->ledger_ns[c] < 0)
			a->ledger_ns[c] += a->ts_ns;
		else if (a->ledger_ns[c] > age)
			a->ledger_ns[c] -= a->ts_ns;
	}
}

/* The process's ledger at present, and the other facts about the process in an arrival. */
INLINE void fill(struct arrival *a, struct process *p)
{
	u64 ended, word, id = bpf_get_current_pid_tgid();
	u32 active;

	a->pid = id >> 32;
	a->tid = id;
	a->flags = 0;
	for (int i = 0; i < 4; i++) {
		ended = LOAD(&p->ended);
		word = LOAD(&p->word);
		a->ts_ns = bpf_ktime_get_ns();
		active = most_active(word);
#pragma unroll
		for (int c = 1; c <= N_CATEGORIES; c++)
			a->ledger_ns[c - 1] = p->ns[c] + (c == active ? a->ts_ns : 0);
		a->flags = LOAD(&p->begun) != ended ? COLLECTIVE_TORN : 0;
		if (!a->flags)
			break;
	}
	if (a->flags) {
		count(TORN_SNAPSHOT);
		mend(a, p->born_ns);
	} else {
#pragma unroll
		for (int c = 0; c < N_CATEGORIES; c++)
			p->reported_ns[c] = a->ledger_ns[c];
	}
	if (p->n_lost)
		a->flags |= COLLECTIVE_THREADS_LOST;
	a->n_threads = 0;
#pragma unroll
	for (int i = 0; i < N_SLOTS; i++)
		a->n_threads += !!(word >> 8 * i & 0xff);
	a->wait_enter_ns = p->wait_leave_ns ? p->wait_enter_ns : -1;
	a->wait_leave_ns = p->wait_leave_ns ? p->wait_leave_ns : -1;
	a->n_syncs = p->n_syncs;
	a->n_allocs = p->n_allocs;
	a->n_copies = p->n_copies;
	a->n_launches = p->n_launches;
	a->spare = 0;
	raw(EVENT_SNAPSHOT, a->ts_ns, id >> 32, id, 0);
}

INLINE void complete(struct arrival *a, const struct held *h)
{
	a->comm_hash = h->comm_hash;
	a->comm = h->comm;
	a->seq = h->seq;
	a->count = h->count;
	a->stream = h->stream;
	a->comm_rank = h->comm_rank;
	a->nranks = h->nranks;
	a->peer_rank = h->peer_rank;
	a->device = h->device;
	a->op = h->op;
	a->datatype = h->datatype;
	a->reduce_op = h->reduce_op;
	a->flags |= h->flags;
}

/* The communicator and the sequence number of the call's round. n: rounds that the arrival represents. */
INLINE void number(struct held *h, u32 tgid, s64 n)
{
	struct comm_key key = { .comm = h->comm, .tgid = tgid };
	struct comm *comm = comm_of(&key);

	h->comm_hash = 0;
	h->seq = h->comm_rank = h->nranks = h->device = -1;
	if (!comm)
		return;
	h->comm_hash = comm->hash;
	h->comm_rank = comm->rank;
	h->nranks = comm->nranks;
	h->device = comm->device;
	h->flags |= comm->flags;
	if (is_peer_call(h->op))
		h->seq = next_to_peer(&key, comm, h->op, h->peer_rank, n);
	else
		h->seq = __sync_fetch_and_add(&comm->seq, n);
}

/* The call was only simulated: its number is free again. */
INLINE void unnumber(const struct held *h, u32 tgid)
{
	struct comm_key key = { .comm = h->comm, .tgid = tgid };
	struct comm *comm = bpf_map_lookup_elem(&comms, &key);

	if (!comm)
		return;
	if (is_peer_call(h->op))
		next_to_peer(&key, comm, h->op, h->peer_rank, -1);
	else
		__sync_fetch_and_add(&comm->seq, -1);
}

INLINE void arrive(struct process *p, const struct held *h)
{
	struct arrival *a = bpf_ringbuf_reserve(&arrivals, sizeof(*a), 0);

	if (!a)
		return count(LOST_ARRIVAL); /* its seq is used: the gap is detected */
	fill(a, p);
	complete(a, h);
	bpf_ringbuf_submit(a, wakeup(&arrivals));
}

/* One of several calls that arrive together: `shared` is filled. */
INLINE void arrive_as(const struct arrival *shared, const struct held *h)
{
	struct arrival *a = bpf_ringbuf_reserve(&arrivals, sizeof(*a), 0);

	if (!a)
		return count(LOST_ARRIVAL);
	__builtin_memcpy(a, shared, sizeof(*a));
	complete(a, h);
	bpf_ringbuf_submit(a, wakeup(&arrivals));
}

/* ---- CUDA graphs ----
 * Captured calls are not repeated at a replay; the graph launch is the arrival. Each communicator has one arrival per
 * launch, for its first call in the graph; its round count advances by all its calls. Captured calls are reported like
 * any other call: all ranks capture the same calls. */

#define N_CAPTURED 8
#define N_CAPTURES 512

struct capture_key {
	s64 capture_ns; /* when it began */
	u32 tgid;
	u32 spare;
};

struct capture {
	u32 n;
	u32 spare;
	struct {
		struct held first;
		s64 n_calls;
	} comms[N_CAPTURED];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_CAPTURES);
	__type(key, struct capture_key);
	__type(value, struct capture);
} captures __weak SEC(".maps");

INLINE bool is_counted_with(const struct held *a, const struct held *b)
{
	if (a->comm != b->comm || is_peer_call(a->op) != is_peer_call(b->op))
		return false;
	return !is_peer_call(a->op) || (a->op == b->op && a->peer_rank == b->peer_rank);
}

/* A call while the process captures a graph. */
INLINE void note_captured(struct process *p, const struct held *h)
{
	struct capture_key key = { .capture_ns = p->capture_ns, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct capture *c;
	u32 i;

	if (!key.capture_ns)
		return;
	c = bpf_map_lookup_elem(&captures, &key);
	if (!c)
		return;
	for (i = 0; i < N_CAPTURED; i++) {
		if (i < c->n && is_counted_with(&c->comms[i].first, h)) {
			c->comms[i].n_calls++;
			return;
		}
		if (i >= c->n) {
			c->comms[i].first = *h;
			c->comms[i].n_calls = 1;
			c->n = i + 1;
			return;
		}
	}
	count(UNGRAPHED);
}

#endif
