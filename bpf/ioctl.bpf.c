// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Calls into the GPU driver: ioctls of its devices, by process and number. Loaded only if requested.
 *
 * The best method attaches to the system call's own function, at no cost to other system calls; if the kernel cannot,
 * the tracepoints of all system calls are used. A call belongs to the driver if the file's device has one of the
 * driver's major numbers, which user space looks up. */
#include "calls.h"
#include "host.h"

#define N_MAJORS 512 /* CHRDEV_MAJOR_MAX, linux/fs.h */
#define MAJOR_SHIFT 20
#define S_IFCHR 0020000
#define FIRST_RESTART 512 /* ERESTARTSYS to ERESTART_RESTARTBLOCK: a signal came in between, and the call begins again */
#define LAST_RESTART 516
#define NVIDIA_MAGIC 'F'
#define UVM_SPECIAL 0x30000000 /* UVM_INITIALIZE is 1 beyond it */
#define FIRST_UVM_SPECIAL 240

const volatile u16 cfg_first_ioctl __weak = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, N_MAJORS);
	__type(key, u32);
	__type(value, u8); /* enum driver */
} driver_majors SEC(".maps");

struct driver_call { /* that the thread is in; since_ns 0: none */
	s64 since_ns;
	u32 symbol;
	u32 device;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct driver_call);
} driver_calls SEC(".maps");

#define N_CALLERS 1024

struct caller {
	char name[16];
};

struct { /* names of the calling processes, which may have ended when their calls are counted */
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_CALLERS);
	__type(key, u32);
	__type(value, struct caller);
} driver_callers SEC(".maps");

INLINE void know_caller(struct task_struct *task)
{
	struct caller c = {};
	u32 tgid = task->tgid;

	if (bpf_map_lookup_elem(&driver_callers, &tgid))
		return;
	BPF_CORE_READ_STR_INTO(&c.name, task, group_leader, comm);
	bpf_map_update_elem(&driver_callers, &tgid, &c, BPF_ANY);
}

/* The device of a descriptor of the calling thread, in the kernel's numbering; 0: it is not a character device. */
INLINE u32 device_of(struct task_struct *task, u64 fd)
{
	struct fdtable *table = ((struct task_struct___host *)task)->files->fdt; /* 0 where one of them is: no fault */
	struct file *file = NULL;
	struct inode *inode;

	if (fd >= table->max_fds || bpf_probe_read_kernel(&file, sizeof(file), table->fd + fd) || !file)
		return 0;
	inode = BPF_CORE_READ(file, f_inode);
	return (BPF_CORE_READ(inode, i_mode) & S_IFMT) == S_IFCHR ? BPF_CORE_READ(inode, i_rdev) : 0;
}

/* A number below IOCTL_NUMBERS: the number of the command if it is one of the driver's commands. UVM's commands are
 * plain numbers, nvidia's have its magic letter, and their size in the upper half. */
INLINE u32 number_of(u8 driver, u32 command)
{
	if (driver == DRIVER_NVIDIA)
		return (command >> 8 & 0xff) == NVIDIA_MAGIC ? command & 0xff : IOCTL_OTHER;
	if (driver != DRIVER_UVM)
		return command & 0xff;
	if (command < FIRST_UVM_SPECIAL)
		return command;
	if (command >= UVM_SPECIAL && command - UVM_SPECIAL < IOCTL_OTHER - FIRST_UVM_SPECIAL)
		return command - UVM_SPECIAL + FIRST_UVM_SPECIAL;
	return IOCTL_OTHER;
}

INLINE int begins(u32 fd, u32 command)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct driver_call *call;
	u32 device, major;
	u8 *driver;

	if (!is_wanted(task->tgid))
		return 0;
	device = device_of(task, fd);
	major = device >> MAJOR_SHIFT;
	driver = bpf_map_lookup_elem(&driver_majors, &major);
	if (!driver || *driver == DRIVER_NONE)
		return 0;
	call = bpf_task_storage_get(&driver_calls, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!call) {
		count(LOST_OPERATION);
		return 0;
	}
	know_caller(task);
	call->symbol = cfg_first_ioctl + IOCTL_NUMBERS * (*driver - 1) + number_of(*driver, command);
	call->device = device;
	call->since_ns = bpf_ktime_get_ns();
	return 0;
}

static const struct details no_details;

INLINE int ends_with(s64 result)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct driver_call *call = bpf_task_storage_get(&driver_calls, task, 0, 0);
	struct host_event *e;
	s64 since, ns;

	if (!call || !call->since_ns)
		return 0;
	since = call->since_ns;
	ns = bpf_ktime_get_ns() - since;
	call->since_ns = 0;
	tally(task->tgid, (u64)call->symbol << 16, &no_details, ns,
	      result < 0 && (result > -FIRST_RESTART || result < -LAST_RESTART));
	if (ns < cfg_slow_call_ns << raised())
		return 0;
	e = host_event(HOST_DRIVER_CALL, since, task);
	if (!e)
		return 0;
	e->duration_ns = ns;
	e->value = result;
	e->device = call->device;
	e->request = call->symbol;
	bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

#ifdef __TARGET_ARCH_arm64
#define IOCTL_FUNCTION "__arm64_sys_ioctl"
#else
#define IOCTL_FUNCTION "__x64_sys_ioctl"
#endif

SEC("?fentry/" IOCTL_FUNCTION)
int BPF_PROG(ioctl_enter, struct pt_regs___kernel *regs)
{
	return begins(SYSCALL_ARG1(regs), SYSCALL_ARG2(regs));
}

SEC("?fexit/" IOCTL_FUNCTION)
int BPF_PROG(ioctl_leave, struct pt_regs___kernel *regs, long result)
{
	return ends_with(result);
}

SEC("?tp_btf/sys_enter")
int BPF_PROG(ioctl_enter_any, struct pt_regs___kernel *regs, long number)
{
	return number == __NR_ioctl ? begins(SYSCALL_ARG1(regs), SYSCALL_ARG2(regs)) : 0;
}

SEC("?tp_btf/sys_exit")
int BPF_PROG(ioctl_leave_any, struct pt_regs___kernel *regs, long result)
{
	return SYSCALL_NR(regs) == __NR_ioctl ? ends_with(result) : 0;
}
