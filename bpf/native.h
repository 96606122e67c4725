/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Native frames of the thread that runs this: a copy of its stack for user space to walk, by the files' unwind tables.
 *
 * A stack is copied once. The walk returns the locations of its return addresses. A later event has the same stack if
 * the thread is at the same location in the program, at the same depth, with the same return addresses there. Until
 * then, and if there are too many kinds of stacks, events have Python frames only. x86-64 only.
 */
#ifndef STALLSCOPE_NATIVE_H
#define STALLSCOPE_NATIVE_H

#include "process_slots.h"
#include "python.h"
#include "registers.h"

#define N_SHAPES 8192

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_SHAPES);
	__type(key, u64);
	__type(value, struct native_shape);
} native_shapes __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} natives __weak SEC(".maps");

static const struct native_shape new_shape;

INLINE bool copy_stack(struct native *e)
{
	void *from = (void *)e->registers.sp;

	e->n_bytes = N_STACK_BYTES;
	if (!bpf_probe_read_user(e->stack, N_STACK_BYTES, from))
		return true;
	e->n_bytes = 1024; /* near the end of the stack */
	return !bpf_probe_read_user(e->stack, 1024, from);
}

INLINE bool tell_native(u64 hash, u64 python, u32 is_return)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct native *e = bpf_ringbuf_reserve(&natives, sizeof(*e), 0);
	u64 id = bpf_get_current_pid_tgid();

	if (!e) {
		count(LOST_STACK);
		return false;
	}
	__builtin_memset(e, 0, sizeof(*e) - N_STACK_BYTES);
	e->hash = hash;
	e->python = python;
	e->pid = id >> 32;
	e->tid = id;
	e->is_return = is_return;
	saved_registers(&e->registers, task);
	hooked_returns(e->hooked, task);
	if (!copy_stack(e)) {
		bpf_ringbuf_discard(e, BPF_RB_NO_WAKEUP);
		return false;
	}
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return true;
}

INLINE u64 check_of(const struct native_shape *shape, u64 sp)
{
	u64 check = 0;

	for (u32 i = 0; i < N_RETURNS && i < shape->n; i++)
		check = mix_in(check, user_word(sp + 8 * (u64)shape->at[i]));
	return check;
}

/* The stack of the calling thread as a hash: native and Python frames, otherwise only Python frames; 0 none.
 * is_return: of a call that has just returned. */
__weak __attribute__((noinline)) u64 whole_stack(u32 is_return)
{
	u64 python = python_stack();
#ifdef __TARGET_ARCH_x86
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct pt_regs___saved *regs;
	struct native_shape *shape;
	u64 hash, sp;

	if (!bpf_map_lookup_elem(&pythons, &tgid))
		return 0;
	regs = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());
	sp = BPF_CORE_READ(regs, sp);
	hash = mix_in(mix_in(mix_in(python ?: tgid, BPF_CORE_READ(regs, ip)), sp), is_return);
	for (int i = 0; i < 3; i++) { /* other stacks may have the same location and depth */
		u64 check;

		shape = bpf_map_lookup_elem(&native_shapes, &hash);
		if (!shape) {
			if (tell_native(hash, python, is_return))
				bpf_map_update_elem(&native_shapes, &hash, &new_shape, BPF_NOEXIST);
			return python;
		}
		if (!shape->is_known)
			return python;
		check = check_of(shape, sp);
		if (check == shape->check)
			return hash;
		hash = mix_in(hash, check);
	}
#endif
	return python;
}

#endif
