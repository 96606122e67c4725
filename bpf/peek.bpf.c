// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Registers of a thread in user mode, and a piece of its process's memory.
 *
 * Nothing is stopped. The number of times that the thread has left the CPU, and whether it is on a CPU, are read
 * before and after: if both are the same and the thread was never on a CPU, the data is consistent. Memory is read by
 * the kernel's own function (from 5.18 on), so this works where process_vm_readv is always forbidden. x86-64 only.
 */
#include "registers.h"

#define PEEK_BYTES 4096 /* at a time: the output must fit into the iterator's eight pages */
#define N_PIECES 6

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} CORE;

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
} CORE;

struct task_struct___peek {
	unsigned long nvcsw;
	unsigned long nivcsw;
	int on_cpu;
} CORE;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct peek_request);
} peek_requests SEC(".maps");

struct peeked {
	struct peek_thread thread;
	u8 bytes[PEEK_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct peeked);
} peeked SEC(".maps");

INLINE u64 n_switches(struct task_struct *task)
{
	struct task_struct___peek *t = (void *)task;

	return BPF_CORE_READ(t, nvcsw) + BPF_CORE_READ(t, nivcsw);
}

INLINE bool is_on_cpu(struct task_struct *task)
{
	struct task_struct___peek *t = (void *)task;

	return bpf_core_field_exists(t->on_cpu) && BPF_CORE_READ(t, on_cpu);
}

INLINE void look(struct peek_thread *out, struct task_struct *task)
{
	out->is_on_cpu = is_on_cpu(task);
	out->n_switches = n_switches(task);
}

SEC("?iter.s/task")
int peek(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct seq_file *seq = ctx->meta->seq;
	u32 zero = 0;
	struct peek_request *asked = bpf_map_lookup_elem(&peek_requests, &zero);
	struct peeked *found = bpf_map_lookup_elem(&peeked, &zero);
	u64 at;

	if (!task || !asked || !found || task->pid != asked->tid)
		return 0;
	__builtin_memset(&found->thread, 0, sizeof(found->thread));
	found->thread.tid = asked->tid;
	look(&found->thread, task);
	saved_registers(&found->thread.registers, task);
	hooked_returns(found->thread.hooked, task);
	found->thread.syscall_nr = SYSCALL_NR((struct pt_regs___kernel *)bpf_task_pt_regs(task));
	bpf_seq_write(seq, &found->thread, sizeof(found->thread));
	at = asked->address ? asked->address : found->thread.registers.sp;
	for (u32 i = 0; i < N_PIECES && i < asked->n_pieces; i++) {
		u32 n_bytes = PEEK_BYTES - MASK(at, PEEK_BYTES - 1); /* up to the end of its page */

		if (bpf_copy_from_user_task(found->bytes, n_bytes, (void *)at, task, 0))
			break;
		bpf_seq_write(seq, found->bytes, PEEK_BYTES);
		at += n_bytes;
	}
	look(&found->thread, task);
	bpf_seq_write(seq, &found->thread, sizeof(found->thread));
	return 0;
}
