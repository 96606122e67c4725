// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* CUDA graphs, runtime and driver: from a capture to the graph, to its executable form, to each launch. */
#include "arrival.h"

#define N_GRAPHS 4096

struct graph_key {
	u64 handle; /* of a graph, or of an executable graph: both are addresses */
	u32 tgid;
	u32 spare;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_GRAPHS);
	__type(key, struct graph_key);
	__type(value, s64); /* when its capture began */
} graphs SEC(".maps");

static const struct capture new_capture;

/* A capture has begun. If it never ends, nothing is lost: captured calls are also reported. */
INLINE void captures_from_now_on(struct process *p)
{
	struct capture_key key = { .capture_ns = bpf_ktime_get_ns(), .tgid = bpf_get_current_pid_tgid() >> 32 };

	bpf_map_update_elem(&captures, &key, &new_capture, BPF_ANY);
	p->capture_ns = key.capture_ns;
}

INLINE void name_capture(u64 out, s64 capture_ns)
{
	struct graph_key key = { .tgid = bpf_get_current_pid_tgid() >> 32 };

	if (capture_ns && !bpf_probe_read_user(&key.handle, sizeof(key.handle), (void *)out) && key.handle)
		bpf_map_update_elem(&graphs, &key, &capture_ns, BPF_ANY);
}

INLINE s64 capture_of(u64 handle)
{
	struct graph_key key = { .handle = handle, .tgid = bpf_get_current_pid_tgid() >> 32 };
	s64 *capture_ns = bpf_map_lookup_elem(&graphs, &key);

	return capture_ns ? *capture_ns : 0;
}

INLINE void launches(struct process *p, struct thread *t, s64 capture_ns)
{
	struct capture_key key = { .capture_ns = capture_ns, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct capture *c = capture_ns ? bpf_map_lookup_elem(&captures, &key) : NULL;
	struct held h;

	if (!c || !c->n)
		return;
	fill(&t->arrival, p);
	for (u32 i = 0; i < N_CAPTURED; i++) {
		if (i >= c->n)
			break;
		h = c->comms[i].first;
		h.flags = COLLECTIVE_GRAPH;
		h.stream = t->graph_stream;
		number(&h, key.tgid, c->comms[i].n_calls);
		__sync_fetch_and_add(&p->n_collectives, c->comms[i].n_calls);
		arrive_as(&t->arrival, &h);
	}
}

/* True: report the return. */
INLINE bool enter(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx), sp = PT_REGS_SP(ctx), now, args[16] = {};
	struct process *p = NULL;
	struct thread *t = NULL;
	struct slot *s;

	if (!self(&t, &p, &s, &now))
		return false;
	if (is_inside(&t->graph, sp, cookie, now))
		return false;
	arguments(ctx, cookie, args);
	open(&t->graph, sp, cookie, now);
	switch (cookie_action(cookie)) {
	case ACTION_CAPTURE_END: /* (stream, graph *) */
		t->graph_out = args[2];
		break;
	case ACTION_INSTANTIATE: /* (executable *, graph) */
		t->graph_out = args[1];
		t->graph_capture_ns = capture_of(args[2]);
		break;
	case ACTION_GRAPH_LAUNCH: /* (executable, stream) */
		t->graph_stream = args[2];
		launches(p, t, capture_of(args[1]));
		break;
	}
	return true;
}

INLINE void leave(struct pt_regs *ctx)
{
	struct process *p = NULL;
	struct thread *t;
	struct slot *s;
	u8 action;

	t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!t || !is_return_of(&t->graph, PT_REGS_SP(ctx)) || !self_again(t, &p, &s))
		return;
	action = cookie_action(t->graph.cookie);
	t->graph.sp = 0;
	if (PT_REGS_RC(ctx)) {
		if (action == ACTION_CAPTURE_END)
			p->capture_ns = 0;
	} else if (action == ACTION_CAPTURE_BEGIN) {
		captures_from_now_on(p);
	} else if (action == ACTION_CAPTURE_END) {
		name_capture(t->graph_out, p->capture_ns);
		p->capture_ns = 0;
	} else if (action == ACTION_INSTANTIATE) {
		name_capture(t->graph_out, t->graph_capture_ns);
	}
}

HOOKS(graph, enter, leave)
