// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* CUDA calls, runtime and driver: synchronise, allocate, free, copy, and launch where asked for.
 * A driver call inside a runtime call is part of it. */
#include "calls.h"

INLINE void count_call(struct process *p, u8 op)
{
	if (op == OP_SYNC)
		__sync_fetch_and_add(&p->n_syncs, 1);
	else if (op == OP_ALLOC || op == OP_FREE)
		__sync_fetch_and_add(&p->n_allocs, 1);
	else if (op == OP_COPY)
		__sync_fetch_and_add(&p->n_copies, 1);
	else if (op == OP_LAUNCH || op == OP_GRAPH_LAUNCH)
		__sync_fetch_and_add(&p->n_launches, 1);
}

/* A copy to the host returns at once if the memory is pinned: then it has not waited. */
#define SHORT_COPY_NS 100000

/* The category that the time in a call is charged to. A copy to the host waits for the work enqueued before it, so
 * with a collective among that work it is a wait for the other ranks, like a synchronise call. */
INLINE u8 category_of(struct process *p, u64 cookie, u8 direction)
{
	bool pending = p->n_collectives != p->n_synced;

	if (cookie_op(cookie) == OP_SYNC)
		return pending ? WAIT_GPU : DEVICE;
	if (cookie_op(cookie) != OP_COPY)
		return cookie_category(cookie);
	return direction == DEVICE_TO_HOST && pending ? WAIT_GPU : COPY;
}

/* The open call ends, or it turns out to have ended without a return. */
INLINE void close(struct process *p, struct thread *t, struct slot *s)
{
	u64 id = bpf_get_current_pid_tgid(), now;

	t->class.sp = 0;
	if (!s)
		return;
	s->call = 0;
	s->class_op = 0;
	now = settle(p, s, MASK(t->slot, 7), state_of(s));
	raw(EVENT_RETURN, now, id >> 32, id, 0);
}

INLINE void ends_wait(struct process *p, struct thread *t, s64 now)
{
	if (cookie_category(t->class.cookie) != WAIT_GPU)
		return;
	if (cookie_op(t->class.cookie) == OP_COPY && now - t->class.since_ns < SHORT_COPY_NS)
		return;
	p->wait_enter_ns = t->class.since_ns;
	p->wait_leave_ns = now;
}

/* True: report the return. */
INLINE bool enter(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx), sp = PT_REGS_SP(ctx), id = bpf_get_current_pid_tgid(), now;
	u8 category;
	struct process *p = NULL;
	struct thread *t = NULL;
	struct details *d;
	struct function *f = function_of(cookie);
	struct slot *s;
	u64 args[16] = {};

	if (!f || is_closed(f->group) || !self(&t, &p, &s, &now))
		return false;
	if (t->class.sp && t->class_details.group == GROUP_RUNTIME_WAITS && is_closed(GROUP_RUNTIME_WAITS))
		close(p, t, s); /* it lasted longer than its probes, or contains this call, which stands for it from now on */
	if (is_inside(&t->class, sp, cookie, now)) {
		if (cookie_op(cookie) == OP_SYNC && f->group != GROUP_RUNTIME_WAITS)
			t->class_details.has_driver_wait = 1;
		count_hit(s, f->group, 1);
		return false;
	}
	if (t->class.sp)
		close(p, t, s);
	count_hit(s, f->group, 2);
	all_arguments(ctx, f, args);
	if (cookie_action(cookie) == ACTION_SET_DEVICE) {
		t->device = (s32)args[1] + 1;
		return false;
	}
	count_call(p, cookie_op(cookie));
	d = &t->class_details;
	look(d, f, args);
	d->shape = f->shape;
	d->group = f->group;
	if (f->shape == SHAPE_FREE)
		frees(id >> 32, d);
	else if (f->shape >= SHAPE_COPY && f->shape <= SHAPE_DRIVER_3D)
		d->host_memory = host_memory(id >> 32, d);
	category = category_of(p, cookie, d->direction);
	cookie = (cookie & ~0xff00ULL) | (u64)category << 8;
	open(&t->class, sp, cookie, now);
	if (!s)
		return true;
	s->class_op = cookie_op(cookie);
	s->class_since_ns = now;
	s->call = category; /* before the swap: if this thread loses the CPU in between, its switch back corrects that */
	now = settle(p, s, MASK(t->slot, 7), state_of(s));
	raw(EVENT_ENTER, now, id >> 32, id, category);
	return true;
}

INLINE void leave(struct pt_regs *ctx)
{
	struct process *p = NULL;
	struct frame f;
	struct thread *t;
	struct slot *s;

	t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!t || !is_return_of(&t->class, PT_REGS_SP(ctx)))
		return;
	if (!self_again(t, &p, &s))
		return;
	f = t->class;
	if (s && t->class_details.group == GROUP_RUNTIME_WAITS) {
		if (t->class_details.has_driver_wait)
			s->n_contained++;
		else
			s->n_bare++;
	}
	ends_wait(p, t, bpf_ktime_get_ns());
	if (cookie_op(f.cookie) == OP_SYNC)
		p->n_synced = p->n_collectives;
	close(p, t, s);
	has_returned(ctx, t, s, &t->class_details, &f);
}

HOOKS(cuda, enter, leave)
