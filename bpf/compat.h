/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Differences between architectures and kernels, and the few kernel fields that are read (located by CO-RE). */
#ifndef STALLSCOPE_COMPAT_H
#define STALLSCOPE_COMPAT_H

#include "events.h"
#include <linux/bpf.h>
#include <asm/ptrace.h>
#include <asm/unistd.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

typedef _Bool bool;
enum { false, true };
#define NULL ((void *)0)
#define INLINE static __always_inline
#define CORE __attribute__((preserve_access_index))

struct sched_info {
	unsigned long long run_delay;
} CORE;

struct cfs_rq {
	int throttle_count;
} CORE;

struct sched_entity {
	u64 sum_exec_runtime;
	struct cfs_rq *cfs_rq;
} CORE;

struct signal_struct {
	struct {
		int counter;
	} live;
} CORE;

struct thread_info {
	struct {
		u32 count;
	} preempt;
} CORE;

struct task_struct {
	struct thread_info thread_info;
	void *stack;
	unsigned flags;
	int pid;
	int tgid;
	struct sched_entity se;
	unsigned in_iowait : 1;
	unsigned long jobctl;
	void *bpf_storage;
	char comm[16];
	struct task_struct *real_parent;
	struct task_struct *group_leader;
	struct signal_struct *signal;
	struct sched_info sched_info;
} CORE;

#if defined(__TARGET_ARCH_arm64)
struct pt_regs___kernel {
	u64 regs[31];
	s32 syscallno;
} CORE;
#define SYSCALL_NR(r) ((r)->syscallno)
#define SYSCALL_ARG1(r) ((r)->regs[0])
#define SYSCALL_ARG2(r) ((r)->regs[1])
#define POPPED 0 /* stack pointer after the return minus the stack pointer at the entry */
#define FIRST_STACK_ARG 9
#define ARG(ctx, n) (((struct user_pt_regs *)(ctx))->regs[(n)-1])
#elif defined(__TARGET_ARCH_x86)
struct pt_regs___kernel {
	unsigned long orig_ax, di, si;
} CORE;
#define SYSCALL_NR(r) ((s32)(r)->orig_ax)
#define SYSCALL_ARG1(r) ((r)->di)
#define SYSCALL_ARG2(r) ((r)->si)
#define POPPED 8
#define FIRST_STACK_ARG 7
#else
#error "neither x86 nor arm64"
#endif

/* Whether this runs in an interrupt, where `current` is the interrupted task.
 *
 * arm64 has the count of interrupts in the thread. On x86 it is a per-CPU variable that BPF finds only in kernels with
 * CONFIG_KALLSYMS_ALL; so the location of the stack decides: an interrupt in kernel mode and all soft interrupts have
 * separate stacks, and an interrupt in user mode is at the bottom of the task's stack without a system call number
 * (arch/x86/include/asm/irq_stack.h, 6.18). The program must use less than 64 bytes of stack: a program with more gets
 * a separate stack from BPF (6.13). */
#if defined(__TARGET_ARCH_arm64)
#define IN_INTERRUPT_BITS 0x00ff0100u /* NMI, hard interrupt, soft interrupt being served */
INLINE bool in_interrupt(struct task_struct *current)
{
	return current->thread_info.preempt.count & IN_INTERRUPT_BITS;
}
#else
#define STACK_BYTES (16 << 10)
#define PF_KTHREAD 0x00200000
INLINE bool in_interrupt(struct task_struct *current)
{
	u64 stack = (u64)current->stack, here;

	asm volatile("%0 = r10" : "=r"(here));
	if (here < stack || here > stack + STACK_BYTES)
		return true;
	if (current->flags & PF_KTHREAD)
		return false;
	return SYSCALL_NR((struct pt_regs___kernel *)bpf_task_pt_regs(current)) < 0;
}
#endif

/* Bound an index so that clang keeps the mask: older verifiers need it where clang knows better. */
#define MASK(x, m)                               \
	({                                       \
		u64 _x = (x);                    \
		asm volatile("" : "+r"(_x));     \
		_x &(m);                         \
	})

/* A load that is ordered on both sides, on every architecture and kernel (BPF has load-acquire from 6.15 on). */
#define LOAD(p) __sync_fetch_and_add(p, 0)

#endif
