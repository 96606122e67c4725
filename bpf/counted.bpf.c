// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* CUDA calls that the ledger does not need: launches, events, streams, graphs, modules. They are counted, and reported
 * if slow or failed. They never change the ledger, so that part-time probes do not bias it. */
#include "calls.h"

/* A context or a module is often set up inside another call: it is reported separately. */
INLINE bool is_own_matter(u8 op)
{
	return op == OP_CONTEXT || op == OP_MODULE;
}

/* True: report the return. */
INLINE bool enter(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx), sp = PT_REGS_SP(ctx), now, args[16] = {};
	struct function *f = function_of(cookie);
	struct process *p = NULL;
	struct thread *t = NULL;
	struct details *d;
	struct slot *s;

	if (!f || !self(&t, &p, &s, &now))
		return false;
	if (is_inside(&t->counted, sp, cookie, now) ||
	    (is_inside(&t->class, sp, cookie, now) && !is_own_matter(cookie_op(cookie)))) {
		count_hit(s, f->group, 1);
		return false;
	}
	count_hit(s, f->group, 2);
	all_arguments(ctx, f, args);
	d = &t->counted_details;
	look(d, f, args);
	d->shape = f->shape;
	d->group = f->group;
	open(&t->counted, sp, cookie, now);
	return true;
}

INLINE void leave(struct pt_regs *ctx)
{
	struct process *p = NULL;
	struct pinned *pins;
	struct frame f;
	struct thread *t;
	struct slot *s;
	s64 now;

	t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!t || !is_return_of(&t->counted, PT_REGS_SP(ctx)) || !self_again(t, &p, &s))
		return;
	f = t->counted;
	t->counted.sp = 0;
	now = bpf_ktime_get_ns();
	if (cookie_op(f.cookie) == OP_CONTEXT && now - f.since_ns > FIRST_CONTEXT_NS && f.since_ns - p->born_ns < YOUNG_NS) {
		pins = pinned_of(bpf_get_current_pid_tgid() >> 32);
		if (pins)
			pins->is_whole = 1;
	}
	has_returned(ctx, t, s, &t->counted_details, &f);
}

/* ---- cost of a hit: the same steps for a function of our own process, which is otherwise not traced ---- */

INLINE bool gauge(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx), args[16] = {}, begin, now;
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct function *f = function_of(cookie);
	struct process *p;
	struct thread *t;

	begin = bpf_ktime_get_ns();
	p = bpf_map_lookup_elem(&processes, &tgid);
	t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	now = bpf_ktime_get_ns();
	if (!t || !f || p)
		return false;
	all_arguments(ctx, f, args);
	look(&t->counted_details, f, args);
	t->counted_details.count_bytes = way_ns(begin, now); /* for the tally */
	open(&t->counted, PT_REGS_SP(ctx), cookie, now);
	return true;
}

INLINE void gauged(struct pt_regs *ctx)
{
	struct thread *t = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);

	if (!t || !is_return_of(&t->counted, PT_REGS_SP(ctx)))
		return;
	t->counted.sp = 0;
	tally(bpf_get_current_pid_tgid() >> 32, t->counted.cookie, &t->counted_details,
	      bpf_ktime_get_ns() - t->counted.since_ns, false);
}

HOOKS(gauge, gauge, gauged)

HOOKS(counted, enter, leave)
