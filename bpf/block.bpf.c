// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Requests to disks: their duration and their process. A process issues its own reads and its synchronous writes. A
 * write by a kernel thread is reported if it is slow, with the thread's name and the control group that is charged;
 * user space keeps the record only if a traced process waited for that disk at the same time. */
#include "host.h"

#define PF_KERNEL_THREAD 0x00200000
#define REQUEST_OP_MASK 0xff
#define N_REQUESTS 8192
#define N_DISK_SUMS 2048

const volatile s64 cfg_slow_io_ns __weak = 10000000;

struct block_device {
	u32 bd_dev;
} CORE;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
} CORE;

struct blkcg {
	struct cgroup_subsys_state css;
} CORE;

struct blkcg_gq {
	struct blkcg *blkcg;
} CORE;

struct bio {
	struct blkcg_gq *bi_blkg;
} CORE;

struct request {
	u32 cmd_flags;
	unsigned __data_len;
	struct bio *bio;
	struct block_device *part;
} CORE;

struct io {
	s64 since_ns;
	u64 cgroup;
	u32 pid;
	u32 tid;
	u32 n_bytes;
	u32 is_kernel;
	char comm[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_REQUESTS);
	__type(key, u64);
	__type(value, struct io);
} requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_DISK_SUMS);
	__type(key, struct disk_key);
	__type(value, struct disk_sums);
} disk_sums SEC(".maps");

static const struct disk_sums no_requests;

INLINE int request_begins(struct request *request)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 key = (u64)request;
	struct io io = {};

	io.is_kernel = !!(task->flags & PF_KERNEL_THREAD);
	if (!io.is_kernel && !is_ours(task))
		return 0;
	io.since_ns = bpf_ktime_get_ns();
	io.pid = task->tgid;
	io.tid = task->pid;
	io.n_bytes = request->__data_len;
	if (io.is_kernel && bpf_core_field_exists(struct bio, bi_blkg))
		io.cgroup = BPF_CORE_READ(request, bio, bi_blkg, blkcg, css.cgroup, kn, id);
	else
		io.cgroup = cgroup_of(task);
	bpf_probe_read_kernel(io.comm, sizeof(io.comm), task->comm);
	bpf_map_update_elem(&requests, &key, &io, BPF_ANY);
	return 0;
}

INLINE void add_up(const struct io *io, u32 device, u32 request, u64 ns)
{
	struct disk_key key = { .pid = io->pid, .device = device, .request = request };
	struct disk_sums *sums = entry_of(&disk_sums, &key, &no_requests);

	if (!sums)
		return;
	__sync_fetch_and_add(&sums->n, 1);
	__sync_fetch_and_add(&sums->n_bytes, io->n_bytes);
	__sync_fetch_and_add(&sums->ns, ns);
	__sync_fetch_and_add(&sums->delays[MASK(magnitude(ns / 1000), N_DELAYS - 1)], 1);
}

INLINE int request_ends(struct request *request)
{
	u64 key = (u64)request;
	struct host_event *e;
	u32 device, what;
	struct io *io;
	s64 ns;

	io = bpf_map_lookup_elem(&requests, &key);
	if (!io)
		return 0;
	ns = bpf_ktime_get_ns() - io->since_ns;
	device = BPF_CORE_READ(request, part, bd_dev);
	what = request->cmd_flags & REQUEST_OP_MASK;
	if (!io->is_kernel)
		add_up(io, device, what, ns);
	if (ns >= cfg_slow_io_ns) {
		e = event(EVENT_HOST, io->since_ns, io->is_kernel ? 0 : io->pid, io->is_kernel ? 0 : io->tid, LOST_HOST);
		if (e) {
			e->op = HOST_BLOCK_IO;
			e->duration_ns = ns;
			e->cgroup = io->cgroup;
			e->value = io->n_bytes;
			e->device = device;
			e->request = what;
			e->by_pid = io->pid;
			__builtin_memcpy(e->by_comm, io->comm, sizeof(e->by_comm));
			bpf_ringbuf_submit(e, wakeup(&events));
		}
	}
	bpf_map_delete_elem(&requests, &key);
	return 0;
}

/* From 6.5 on: in the context of the requesting task, and including the time in the queue. */
SEC("?tp_btf/block_io_start")
int BPF_PROG(block_start, struct request *request)
{
	return request_begins(request);
}

SEC("?tp_btf/block_io_done")
int BPF_PROG(block_done, struct request *request)
{
	return request_ends(request);
}

SEC("?tp_btf/block_rq_issue")
int BPF_PROG(block_issue, struct request *request)
{
	return request_begins(request);
}

SEC("?tp_btf/block_rq_complete")
int BPF_PROG(block_complete, struct request *request)
{
	return request_ends(request);
}
