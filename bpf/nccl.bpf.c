// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* NCCL calls: arrivals with the ledger on them, groups, and the life of communicators.
 *
 * A communicator is identified across ranks by a hash: of its 128-byte unique id; for a communicator made from a
 * parent, of the parent's hash, of the number of children made from the parent in the same way before, and of the
 * colour of a split or the excluded ranks of a shrink. When a communicator is grown, the new ranks and the root get an
 * id, the other old ranks do not: their hash is derived from the parent, and user space merges the two identities
 * (capture/process/comm_grow.py). A communicator made before the attach has hash 0. */
#include "arrival.h"

#define N_HELD 64
#define N_DEVICES 16
#define N_EXCLUDED 256
#define ID_WORDS 16
#define SHRUNK_COLOR (-2)
#define GROWN_COLOR (-3)
#define OF_SHRINKS (1ULL << 32) /* distinguishes children that were made in different ways */
#define OF_GROWS (2ULL << 32)
#define NCCL_IN_PROGRESS 7

struct group {
	u32 n;
	u32 spare;
	struct held calls[N_HELD];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct group);
} groups SEC(".maps");

/* The calls of a group arrive together, at its end. */
INLINE void arrive_together(struct process *p, struct thread *t, struct group *g)
{
	u32 n = g->n;

	g->n = 0;
	if (!n)
		return;
	__sync_fetch_and_add(&p->n_collectives, n);
	fill(&t->arrival, p);
	for (u32 i = 0; i < N_HELD; i++) {
		if (i >= n)
			break;
		arrive_as(&t->arrival, &g->calls[MASK(i, N_HELD - 1)]);
	}
}

INLINE void collective(struct process *p, struct thread *t, u64 cookie, const u64 args[16])
{
	struct group *g = NULL;
	struct held h = {};

	h.comm = arg(args, cookie, COMM_ARG, 0);
	h.op = cookie_op(cookie);
	h.count = arg(args, cookie, COUNT_ARG, -1);
	h.datatype = arg(args, cookie, DATATYPE_ARG, -1) + 1;
	h.reduce_op = arg(args, cookie, REDUCTION_ARG, -1) + 1;
	h.peer_rank = arg(args, cookie, PEER_ARG, -1);
	h.stream = arg(args, cookie, STREAM_ARG, 0);
	number(&h, bpf_get_current_pid_tgid() >> 32, 1);
	note_captured(p, &h);
	if (t->group_depth) {
		h.flags |= COLLECTIVE_GROUPED;
		g = bpf_task_storage_get(&groups, bpf_get_current_task_btf(), 0, 0);
		if (g && g->n < N_HELD) {
			g->calls[MASK(g->n, N_HELD - 1)] = h;
			g->n++;
			return;
		}
		count(UNGROUPED);
	}
	__sync_fetch_and_add(&p->n_collectives, 1);
	arrive(p, &h);
}

INLINE void group_starts(struct thread *t)
{
	struct group *g;

	if (t->group_depth++)
		return;
	g = bpf_task_storage_get(&groups, bpf_get_current_task_btf(), 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (g)
		g->n = 0;
}

INLINE void group_ends(struct process *p, struct thread *t)
{
	struct group *g;

	if (!t->group_depth || --t->group_depth)
		return; /* begun before the attach, or not the outermost one */
	g = bpf_task_storage_get(&groups, bpf_get_current_task_btf(), 0, 0);
	if (g)
		arrive_together(p, t, g);
}

/* A group that ends without being run: its collected calls were not rounds. */
INLINE void group_is_dropped(struct thread *t)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32, n;
	struct group *g;

	if (!t->group_depth || --t->group_depth)
		return;
	g = bpf_task_storage_get(&groups, bpf_get_current_task_btf(), 0, 0);
	if (!g)
		return;
	n = g->n;
	g->n = 0;
	for (u32 i = 0; i < N_HELD; i++) {
		if (i >= n)
			break;
		unnumber(&g->calls[MASK(i, N_HELD - 1)], tgid);
	}
}

/* ---- communicators ---- */

/* Hash of a unique id in the caller's memory; 0 when it cannot be read. */
INLINE u64 id_hash(const void *id)
{
	u64 words[ID_WORDS], hash = HASH_BASIS;

	if (!id || bpf_probe_read_user(words, sizeof(words), id))
		return 0;
#pragma unroll
	for (int i = 0; i < ID_WORDS; i++)
		hash = mixed(hash, words[i]);
	return hash ? hash : 1;
}

INLINE void init_rank(struct pt_regs *ctx, struct made_comm *m, const u64 args[16])
{
#ifdef __TARGET_ARCH_arm64
	m->hash = id_hash((void *)args[3]); /* 128 bytes by value go by reference (AAPCS64) */
	m->rank = args[4];
#else
	m->hash = id_hash((void *)(PT_REGS_SP(ctx) + 8)); /* and here lie on the stack */
	m->rank = args[3];
#endif
	m->out = args[1];
	m->nranks = args[2];
}

/* The parent's entry, and the child's facts that follow from it. */
INLINE struct comm *of_parent(struct made_comm *m, u64 handle, s32 color)
{
	struct comm_key key = { .comm = handle, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct comm *parent = comm_of(&key);

	m->color = color;
	if (!parent)
		return NULL;
	m->parent_hash = parent->hash;
	m->parent_rank = parent->rank;
	m->parent_nranks = parent->nranks;
	return parent;
}

/* The hash of a child; unknown if the parent's hash is. n: index of the child; what: further facts known to all its
 * ranks. */
INLINE u64 child_hash(u64 parent_hash, u64 n, u64 what)
{
	u64 hash = mixed(mixed(mixed(HASH_BASIS, parent_hash), n), what);

	if (!parent_hash)
		return 0;
	return hash ? hash : 1;
}

INLINE void split(struct made_comm *m, const u64 args[16])
{
	struct comm *parent = of_parent(m, args[1], args[2]);

	m->key = args[3];
	m->out = args[4];
	if (!parent)
		return;
	m->n_splits = __sync_fetch_and_add(&parent->n_splits, 1);
	m->hash = child_hash(parent->hash, m->n_splits, (u32)m->color);
}

/* The remaining ranks keep their order, and only they take part. They may pass the excluded ranks in any order. */
INLINE void shrink(struct made_comm *m, const u64 args[16])
{
	struct comm *parent = of_parent(m, args[1], SHRUNK_COLOR);
	s32 rank, n = args[3], below = 0;
	u64 excluded = n;
	int i = 0;

	m->out = args[4];
	if (!parent)
		return;
	m->n_splits = __sync_fetch_and_add(&parent->n_shrinks, 1);
	if (n >= 0 && n <= N_EXCLUDED) {
		for (; i < N_EXCLUDED; i++) {
			if (i >= n || bpf_probe_read_user(&rank, sizeof(rank), (void *)(args[2] + 4 * i)))
				break;
			below += rank < m->parent_rank;
			excluded += mixed(HASH_BASIS, (u32)rank);
		}
	}
	m->hash = child_hash(parent->hash, OF_SHRINKS | (u32)m->n_splits, i == n ? excluded : n);
	if (i != n || m->parent_rank < 0)
		return;
	m->rank = m->parent_rank - below;
	m->nranks = m->parent_nranks - n;
}

/* Old ranks pass their communicator and keep their rank; new ranks and the root of the old ranks have the id. */
INLINE void grow(struct made_comm *m, const u64 args[16])
{
	struct comm *parent = NULL;

	m->nranks = args[2];
	m->rank = args[4];
	m->out = args[5];
	m->color = GROWN_COLOR;
	if (args[1])
		parent = of_parent(m, args[1], GROWN_COLOR);
	if (parent) {
		m->n_splits = __sync_fetch_and_add(&parent->n_grows, 1);
		m->hash = child_hash(parent->hash, OF_GROWS | (u32)m->n_splits, m->nranks);
		m->rank = m->parent_rank;
	}
	if (args[3])
		m->hash = id_hash((void *)args[3]);
}

INLINE void makes_comm(struct pt_regs *ctx, struct made_comm *m, u64 cookie, const u64 args[16])
{
	__builtin_memset(m, 0, sizeof(*m));
	m->rank = m->nranks = m->parent_rank = m->parent_nranks = -1;
	switch (cookie_action(cookie)) {
	case ACTION_INIT_RANK:
		init_rank(ctx, m, args);
		break;
	case ACTION_INIT_SCALABLE:
		m->out = args[1];
		m->nranks = args[2];
		m->rank = args[3];
		m->hash = id_hash((void *)args[5]);
		break;
	case ACTION_INIT_ALL:
		m->out = args[1];
		m->nranks = args[2];
		m->devices = args[3];
		break;
	case ACTION_SPLIT:
		split(m, args);
		break;
	case ACTION_SHRINK:
		shrink(m, args);
		break;
	case ACTION_GROW:
		grow(m, args);
		break;
	}
}

INLINE void tell_comm(u16 kind, u8 op, u64 comm, const struct comm *c, const struct made_comm *m)
{
	u64 id = bpf_get_current_pid_tgid();
	struct life_event *e = event(kind, bpf_ktime_get_ns(), id >> 32, id, LOST_LIFE);

	if (!e)
		return;
	e->op = op;
	e->comm = comm;
	e->comm_hash = c->hash;
	e->comm_rank = c->rank;
	e->nranks = c->nranks;
	e->device = c->device;
	e->parent_rank = e->parent_nranks = -1;
	if (m) {
		e->parent_hash = m->parent_hash;
		e->parent_rank = m->parent_rank;
		e->parent_nranks = m->parent_nranks;
		e->color = m->color;
		e->key = m->key;
		e->n_splits = m->n_splits;
	}
	bpf_ringbuf_submit(e, wakeup(&events));
}

/* Without a handle: a rank that takes part in a split, but in none of the new communicators. */
INLINE void born(u8 op, u64 handle, u64 hash, s32 rank, s32 device, const struct made_comm *m)
{
	struct comm_key key = { .comm = handle, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct comm comm = { .hash = hash, .rank = rank, .nranks = m->nranks, .device = device };

	comm.born_ns = bpf_ktime_get_ns();
	if (handle && bpf_map_update_elem(&comms, &key, &comm, BPF_ANY))
		count(LOST_COMM);
	tell_comm(EVENT_COMM_BORN, op, handle, &comm, m);
}

/* One process, all its devices: no other process takes part, so any new hash will do. */
INLINE void born_all(u8 op, const struct made_comm *m)
{
	u64 hash = mixed(mixed(HASH_BASIS, bpf_ktime_get_ns()), bpf_get_current_pid_tgid()), handle;
	s32 device;

	for (int i = 0; i < N_DEVICES; i++) {
		if (i >= m->nranks)
			break;
		device = i;
		if (m->devices)
			bpf_probe_read_user(&device, sizeof(device), (void *)(m->devices + 4 * i));
		if (!bpf_probe_read_user(&handle, sizeof(handle), (void *)(m->out + 8 * i)) && handle)
			born(op, handle, hash, i, device, m);
	}
}

/* A call that makes a communicator has returned: now its handle is known. */
INLINE void has_made_comm(const struct thread *t, u64 cookie, s32 result)
{
	u64 handle = 0;

	if (result && result != NCCL_IN_PROGRESS)
		return;
	if (cookie_action(cookie) == ACTION_INIT_ALL)
		return born_all(cookie_op(cookie), &t->made);
	if (!bpf_probe_read_user(&handle, sizeof(handle), (void *)t->made.out) &&
	    (handle || cookie_action(cookie) == ACTION_SPLIT))
		born(cookie_op(cookie), handle, handle ? t->made.hash : 0, t->made.rank, t->device - 1, &t->made);
}

INLINE void destroys(u8 op, u64 handle)
{
	struct comm_key key = { .comm = handle, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct comm *comm = bpf_map_lookup_elem(&comms, &key);

	if (!comm)
		return;
	tell_comm(EVENT_COMM_DEAD, op, handle, comm, NULL);
	bpf_map_delete_elem(&comms, &key);
}

/* ---- entry and return ---- */

INLINE bool makes(u8 action)
{
	return action >= ACTION_INIT_RANK && action <= ACTION_GROW;
}

/* True: report the return. */
INLINE bool enter(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx), sp = PT_REGS_SP(ctx), now;
	u8 action = cookie_action(cookie);
	struct process *p = NULL;
	struct thread *t = NULL;
	struct slot *s;
	u64 args[16] = {};

	if (!self(&t, &p, &s, &now))
		return false;
	if (is_inside(&t->nccl, sp, cookie, now)) {
		count_hit(s, GROUP_ALWAYS, 1);
		return false;
	}
	count_hit(s, GROUP_ALWAYS, 2);
	p->uses_nccl = 1;
	open(&t->nccl, sp, cookie, now);
	if (s) {
		s->nccl_since_ns = now;
		s->nccl_op = cookie_op(cookie);
	}
	arguments(ctx, cookie, args);
	if (action == ACTION_COLLECTIVE)
		collective(p, t, cookie, args);
	else if (action == ACTION_GROUP_START)
		group_starts(t);
	else if (action == ACTION_GROUP_END)
		group_ends(p, t);
	else if (action == ACTION_GROUP_SIMULATE)
		group_is_dropped(t);
	else if (action == ACTION_ENQUEUE)
		__sync_fetch_and_add(&p->n_collectives, 1);
	else if (action == ACTION_DESTROY)
		destroys(cookie_op(cookie), args[1]);
	else if (makes(action))
		makes_comm(ctx, &t->made, cookie, args);
	return true;
}

INLINE void leave(struct pt_regs *ctx)
{
	s32 result = PT_REGS_RC(ctx);
	struct process *p = NULL;
	struct thread *t;
	struct slot *s;
	u64 cookie;
	s64 since;

	t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!t || !is_return_of(&t->nccl, PT_REGS_SP(ctx)))
		return;
	if (!self_again(t, &p, &s))
		return;
	cookie = t->nccl.cookie;
	since = t->nccl.since_ns;
	t->nccl.sp = 0;
	if (s)
		s->nccl_op = 0;
	if (makes(cookie_action(cookie)))
		has_made_comm(t, cookie, result);
	report_call(t, cookie, since, result, result && result != NCCL_IN_PROGRESS);
}

HOOKS(nccl, enter, leave)
