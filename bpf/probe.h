/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Shared parts of the programs on functions: the cookie that describes a function, open calls, arguments, reports. */
#ifndef STALLSCOPE_PROBE_H
#define STALLSCOPE_PROBE_H

#include "native.h"
#include "process_slots.h"
#include "stack.h"

INLINE u8 cookie_op(u64 cookie)
{
	return cookie;
}

INLINE u8 cookie_category(u64 cookie)
{
	return cookie >> 8;
}

INLINE u16 cookie_symbol(u64 cookie)
{
	return cookie >> 16;
}

INLINE u8 cookie_action(u64 cookie)
{
	return cookie >> 32;
}

/* Only the outermost call counts. The stack grows down, so the stack pointer identifies it, without a depth count that
 * could go wrong. At the same stack pointer a call is a tail call of the open call, or the same call seen by a second
 * link; after the limits below, the open call was left without a return. */

#define SAME_CALL_NS 50000
#define TAIL_CALL_NS 100000000

INLINE bool is_inside(const struct frame *f, u64 sp, u64 cookie, u64 now)
{
	if (!f->sp || sp > f->sp)
		return false;
	if (sp < f->sp)
		return true;
	return now - f->since_ns < (cookie_symbol(f->cookie) == cookie_symbol(cookie) ? SAME_CALL_NS : TAIL_CALL_NS);
}

INLINE void open(struct frame *f, u64 sp, u64 cookie, u64 now)
{
	f->sp = sp;
	f->cookie = cookie;
	f->since_ns = now;
}

INLINE bool is_return_of(const struct frame *f, u64 sp)
{
	return f->sp && sp >= f->sp + POPPED;
}

/* The programs of a part, for each attach method: one link that covers entry and return (from 6.13 on), or one link
 * for each. enters: true if the return is to be reported. A session has separate functions for entry and return:
 * together their variables do not fit on one stack of 512 bytes. */
#define HOOKS(part, enters, leaves)                          \
	static __attribute__((noinline)) int part##_enters(struct pt_regs *ctx) \
	{                                                    \
		return enters(ctx);                          \
	}                                                    \
	static __attribute__((noinline)) int part##_leaves(struct pt_regs *ctx) \
	{                                                    \
		leaves(ctx);                                 \
		return 0;                                    \
	}                                                    \
	SEC("?uprobe")                                       \
	int part##_session(struct pt_regs *ctx)              \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		if (PT_REGS_IP(ctx) == bpf_get_func_ip(ctx)) \
			return !part##_enters(ctx);          \
		return part##_leaves(ctx);                   \
	}                                                    \
	SEC("?uprobe")                                       \
	int part##_enter(struct pt_regs *ctx)                \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		enters(ctx);                                 \
		return 0;                                    \
	}                                                    \
	SEC("?uretprobe")                                    \
	int part##_return(struct pt_regs *ctx)               \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		leaves(ctx);                                 \
		return 0;                                    \
	}

/* Bit position in the cookie of each argument number. */
#define COUNT_ARG 40
#define DATATYPE_ARG 44
#define REDUCTION_ARG 48
#define PEER_ARG 52
#define COMM_ARG 56
#define STREAM_ARG 60

INLINE u32 arg_number(u64 cookie, u32 at)
{
	return cookie >> at & 15;
}

/* args[1] is the first argument; the stack is read only if the cookie refers to an argument there. */
INLINE void arguments(struct pt_regs *ctx, u64 cookie, u64 args[16])
{
#ifdef __TARGET_ARCH_arm64
	args[1] = ARG(ctx, 1), args[2] = ARG(ctx, 2), args[3] = ARG(ctx, 3), args[4] = ARG(ctx, 4);
	args[5] = ARG(ctx, 5), args[6] = ARG(ctx, 6), args[7] = ARG(ctx, 7), args[8] = ARG(ctx, 8);
#else
	args[1] = PT_REGS_PARM1(ctx), args[2] = PT_REGS_PARM2(ctx), args[3] = PT_REGS_PARM3(ctx);
	args[4] = PT_REGS_PARM4(ctx), args[5] = PT_REGS_PARM5(ctx), args[6] = ctx->r9;
	if (arg_number(cookie, STREAM_ARG) > 6 || arg_number(cookie, COMM_ARG) > 6 || arg_number(cookie, DATATYPE_ARG) > 6)
		bpf_probe_read_user(&args[7], 16, (void *)(PT_REGS_SP(ctx) + 8));
#endif
}

/* `missing` if the call has no such argument. */
INLINE u64 arg(const u64 args[16], u64 cookie, u32 at, u64 missing)
{
	u32 n = arg_number(cookie, at);

	return n ? args[MASK(n, 15)] : missing;
}

/* A call has ended: report it. `d`: its arguments, or NULL. */
INLINE void report_call_with(const struct thread *t, u64 cookie, s64 since, s64 duration, s32 result,
			   const struct details *d)
{
	u64 id = bpf_get_current_pid_tgid(), stack = whole_stack(true); /* emitted before its first event */
	struct call_event *e = event(EVENT_CALL, since, id >> 32, id, LOST_CALL);

	if (!e)
		return;
	e->duration_ns = duration;
	e->stack = stack;
	e->op = cookie_op(cookie);
	e->symbol = cookie_symbol(cookie);
	e->category = cookie_category(cookie);
	e->count_bytes = -1;
	e->result = result;
	e->device = t->device - 1;
	if (d) {
		e->count_bytes = d->count_bytes;
		e->stream = d->stream;
		e->address = d->address;
		e->handle = d->handle;
		__builtin_memcpy(e->grid, d->grid, sizeof(e->grid));
		__builtin_memcpy(e->block, d->block, sizeof(e->block));
		e->direction = d->direction;
		e->host_memory = d->host_memory;
		e->memory = d->memory;
	}
	bpf_ringbuf_submit(e, wakeup(&events));
}

/* A call has ended: report it if it was slow, or failed. */
INLINE void report_call(const struct thread *t, u64 cookie, s64 since, s32 result, bool has_failed)
{
	s64 duration = bpf_ktime_get_ns() - since;

	if (!has_failed && duration < cfg_slow_call_ns << raised())
		return;
	report_call_with(t, cookie, since, duration, result, NULL);
}

#endif
