/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* A thread's registers in user mode, and the return addresses on its stack that probes have replaced. x86-64. */
#ifndef STALLSCOPE_REGISTERS_H
#define STALLSCOPE_REGISTERS_H

#include "compat.h"

struct pt_regs___saved {
	unsigned long r15, r14, r13, r12, bp, bx, ip, sp;
} CORE;

struct return_instance {
	unsigned long stack; /* the stack pointer at the entry, which is the address of the return address */
	unsigned long orig_ret_vaddr;
	struct return_instance *next;
} CORE;

struct uprobe_task {
	struct return_instance *return_instances;
} CORE;

struct task_struct___hooked {
	struct uprobe_task *utask;
} CORE;

#ifdef __TARGET_ARCH_x86
/* The location of a task in its program: the same number at the same location and depth of the stack. */
INLINE u64 place_of(struct task_struct *task)
{
	struct pt_regs___saved *regs = (void *)bpf_task_pt_regs(task);

	return BPF_CORE_READ(regs, ip) << 16 ^ BPF_CORE_READ(regs, sp);
}

INLINE void saved_registers(struct registers *out, struct task_struct *task)
{
	struct pt_regs___saved *regs = (void *)bpf_task_pt_regs(task);

	out->ip = BPF_CORE_READ(regs, ip);
	out->sp = BPF_CORE_READ(regs, sp);
	out->bp = BPF_CORE_READ(regs, bp);
	out->bx = BPF_CORE_READ(regs, bx);
	out->r12 = BPF_CORE_READ(regs, r12);
	out->r13 = BPF_CORE_READ(regs, r13);
	out->r14 = BPF_CORE_READ(regs, r14);
	out->r15 = BPF_CORE_READ(regs, r15);
}

/* Return probes write their own address in place of the return address (kernel/events/uprobes.c). */
INLINE void hooked_returns(struct hooked_return *out, struct task_struct *task)
{
	struct task_struct___hooked *t = (void *)task;
	struct return_instance *r = BPF_CORE_READ(t, utask, return_instances);

	for (u32 i = 0; i < N_HOOKED && r; i++) {
		out[i].at = BPF_CORE_READ(r, stack);
		out[i].address = BPF_CORE_READ(r, orig_ret_vaddr);
		r = BPF_CORE_READ(r, next);
	}
}
#else
INLINE u64 place_of(struct task_struct *task)
{
	return 0;
}

INLINE void saved_registers(struct registers *out, struct task_struct *task)
{
}

INLINE void hooked_returns(struct hooked_return *out, struct task_struct *task)
{
}
#endif

#endif
