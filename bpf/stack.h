/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Keeps programs on the stack of their thread. */
#ifndef STALLSCOPE_STACK_H
#define STALLSCOPE_STACK_H

#include "compat.h"

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} no_programs __weak SEC(".maps");

/* Keeps a program on the stack of its thread. From 6.13 on, x86-64 gives programs of this type one stack for each CPU,
 * as if no program could interrupt another. But a program in a probe of a user's function may lose the CPU to another
 * thread that runs the same program, if the kernel preempts in kernel mode, and then reads the other program's data on
 * that stack: this caused an oops on 7.2. A program with a tail call has no such stack (check_max_stack_depth() in
 * kernel/bpf/verifier.c); the call never happens. */
#define ON_STACK_OF_THREAD(ctx) \
	if (cfg_never)          \
	bpf_tail_call(ctx, &no_programs, 0)

#endif
