/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Events of the machine that affect the traced processes: the process of each event, and its record.
 *
 * The descendants of traced processes are included: data loader workers, compilers, checkpoint writers. Descendants
 * born during the trace are remembered, because a process whose parent has ended gets another parent; older
 * descendants are found through their parents. Every program checks this before it reads or keeps anything. */
#ifndef STALLSCOPE_HOST_H
#define STALLSCOPE_HOST_H

#include "probe.h"

#define N_GENERATIONS 4
#define N_KIN 8192
#define AF_INET 2
#define AF_INET6 10
#define S_IFMT 0170000
#define S_IFSOCK 0140000

struct kernfs_node {
	u64 id;
} CORE;

struct cgroup {
	struct kernfs_node *kn;
} CORE;

struct css_set {
	struct cgroup *dfl_cgrp;
} CORE;

struct super_block {
	u32 s_dev;
} CORE;

struct inode {
	unsigned short i_mode;
	u32 i_rdev;
	unsigned long i_ino;
	struct super_block *i_sb;
} CORE;

struct qstr {
	const unsigned char *name;
} CORE;

struct dentry {
	struct qstr d_name;
} CORE;

struct path {
	struct dentry *dentry;
} CORE;

struct file {
	struct inode *f_inode;
	struct path f_path;
	void *private_data;
} CORE;

struct fdtable {
	unsigned max_fds;
	struct file **fd;
} CORE;

struct files_struct {
	struct fdtable *fdt;
} CORE;

struct net_device {
	char name[16];
} CORE;

struct dst_entry {
	struct net_device *dev;
} CORE;

struct in6_addr {
	u8 bytes[16];
};

struct sock_common {
	u32 skc_daddr;
	u16 skc_dport;
	u16 skc_num;
	unsigned short skc_family;
	struct in6_addr skc_v6_daddr;
} CORE;

struct socket;

struct sock {
	struct sock_common __sk_common;
	int sk_sndbuf;
	int sk_wmem_queued;
	struct dst_entry *sk_dst_cache;
	struct socket *sk_socket;
} CORE;

struct socket {
	struct file *file;
	struct sock *sk;
} CORE;

struct task_struct___host {
	u64 start_boottime;
	int exit_code;
	struct files_struct *files;
	struct css_set *cgroups;
} CORE;

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_PROCESSES);
	__type(key, u32);
	__type(value, struct host_sums);
} host_sums __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_KIN);
	__type(key, u32);
	__type(value, u8);
} kin __weak SEC(".maps");

INLINE bool is_watched(u32 tgid)
{
	if (tgid == cfg_self)
		return false;
	if (bpf_map_lookup_elem(&processes, &tgid))
		return true;
	return cfg_only_targets && bpf_map_lookup_elem(&targets, &tgid);
}

/* Whether the task belongs to a traced process or descends from one. */
INLINE bool is_ours(struct task_struct *task)
{
	u32 tgid = task->tgid;

	if (tgid == cfg_self)
		return false;
	if (bpf_map_lookup_elem(&kin, &tgid))
		return true;
	for (int i = 0; i <= N_GENERATIONS; i++) {
		if (!task || task->tgid <= 1 || task->tgid == cfg_self)
			return false;
		if (is_watched(task->tgid))
			return true;
		task = task->real_parent;
	}
	return false;
}

INLINE u64 cgroup_of(struct task_struct *task)
{
	return BPF_CORE_READ((struct task_struct___host *)task, cgroups, dfl_cgrp, kn, id);
}

INLINE struct host_event *host_event(u16 what, s64 ts_ns, struct task_struct *task)
{
	struct host_event *e = event(EVENT_HOST, ts_ns, task->tgid, task->pid, LOST_HOST);

	if (!e)
		return NULL;
	e->op = what;
	e->duration_ns = -1;
	e->value = -1;
	e->by_pid = -1;
	e->cgroup = cgroup_of(task);
	bpf_probe_read_kernel(e->name, sizeof(task->comm), task->comm);
	return e;
}

INLINE void by(struct host_event *e, struct task_struct *task)
{
	e->by_pid = task->tgid;
	bpf_probe_read_kernel(e->by_comm, sizeof(e->by_comm), task->comm);
}

static const struct host_sums no_sums;

INLINE struct host_sums *sums_of(u32 tgid)
{
	return entry_of(&host_sums, &tgid, &no_sums);
}

/* Whether the CPU quota of the task's control group, or of one above it, is used up. */
INLINE bool is_throttled(struct task_struct *task)
{
	if (!bpf_core_field_exists(struct sched_entity, cfs_rq) || !bpf_core_field_exists(struct cfs_rq, throttle_count))
		return false;
	return BPF_CORE_READ(task, se.cfs_rq, throttle_count) > 0;
}

INLINE void ends_of(struct ends *ends, struct sock *sk)
{
	u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);

	ends->family = family;
	ends->peer_port = BPF_CORE_READ(sk, __sk_common.skc_dport);
	ends->own_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	if (family == AF_INET)
		BPF_CORE_READ_INTO((u32 *)ends->peer, sk, __sk_common.skc_daddr);
	else if (family == AF_INET6 && bpf_core_field_exists(struct sock_common, skc_v6_daddr))
		BPF_CORE_READ_INTO((struct in6_addr *)ends->peer, sk, __sk_common.skc_v6_daddr);
}

/* The file of a task's system call, identified by its descriptor. The task is still inside the call, so the descriptor
 * refers to the same file as when the task blocked, unless another thread has closed it since. */
INLINE void tell_file(struct off_event *e, struct task_struct *task, u64 fd)
{
	struct fdtable *table = BPF_CORE_READ((struct task_struct___host *)task, files, fdt);
	struct file *file = NULL, **files;
	struct socket *socket;
	struct inode *inode;

	if (!bpf_core_field_exists(struct file, f_inode) || !bpf_core_field_exists(struct file, f_path))
		return;
	if (!table || fd >= BPF_CORE_READ(table, max_fds))
		return;
	files = BPF_CORE_READ(table, fd);
	if (bpf_probe_read_kernel(&file, sizeof(file), files + fd) || !file)
		return;
	inode = BPF_CORE_READ(file, f_inode);
	e->fd = fd;
	e->inode = BPF_CORE_READ(inode, i_ino);
	if ((BPF_CORE_READ(inode, i_mode) & S_IFMT) == S_IFSOCK) {
		socket = BPF_CORE_READ(file, private_data);
		ends_of((struct ends *)e->file, BPF_CORE_READ(socket, sk));
		return;
	}
	e->device = BPF_CORE_READ(inode, i_sb, s_dev);
	bpf_probe_read_kernel_str(e->file, sizeof(e->file), BPF_CORE_READ(file, f_path.dentry, d_name.name));
}

#endif
