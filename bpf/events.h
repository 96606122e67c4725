/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Records from the kernel side to user space: the only definition of the layout.
 *
 * src/stallscope/events/kernel.py has the same records as numpy dtypes; the loader compares both field by field
 * through the object's BTF before the first record is read. Times are ns of CLOCK_MONOTONIC; -1 is "unknown" for
 * times, ranks and counts. Enumerations have the numbers of src/stallscope/events/names.py; a test compares them.
 *
 * Two rings, each with records of one size. With the ring's own header of 8 bytes a record takes 256 or 128 bytes,
 * which divides the ring, so no record straddles its end and a reader sees an array.
 */
#ifndef STALLSCOPE_EVENTS_H
#define STALLSCOPE_EVENTS_H

#include <linux/types.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s16 s16;
typedef __s32 s32;
typedef __s64 s64;

#define N_CATEGORIES 16
#define N_GROUPS 8 /* of probes, enum hook_group: a power of two */
#define N_SLOTS 8 /* GPU threads of a process that the ledger follows at a time: bytes of one 64-bit word */

enum category {
	NONE,
	LOCK,
	OTHER_OFF,
	SLEEP,
	NET,
	CHILD,
	WAIT_GPU,
	DEVICE,
	STOPPED,
	PREEMPTED,
	FAULT,
	DRIVER,
	IO,
	LAUNCH,
	COPY,
	ALLOC,
	ON_CPU,
};

enum op {
	OP_NONE = 0,
	OP_ALL_REDUCE = 1,
	OP_ALL_GATHER = 2,
	OP_REDUCE_SCATTER = 3,
	OP_BROADCAST = 4,
	OP_REDUCE = 5,
	OP_ALL_TO_ALL = 6,
	OP_GATHER = 7,
	OP_SCATTER = 8,
	OP_SEND = 9,
	OP_RECV = 10,
	OP_GROUP = 11,
	OP_ONE_SIDED = 12,
	OP_COMM_INIT = 16,
	OP_COMM_SPLIT = 17,
	OP_COMM_DESTROY = 18,
	OP_COMM_SETUP = 19,
	OP_SYNC = 32,
	OP_ALLOC = 33,
	OP_FREE = 34,
	OP_COPY = 35,
	OP_LAUNCH = 36,
	OP_GRAPH_LAUNCH = 37,
	OP_STREAM_WAIT = 38,
	OP_EVENT_RECORD = 39,
	OP_EVENT = 40,
	OP_STREAM = 41,
	OP_MODULE = 42,
	OP_GRAPH = 43,
	OP_MEMSET = 44,
	OP_CONTEXT = 45,
	OP_IOCTL = 46,
};

enum collective_flag {
	COLLECTIVE_TORN = 1,
	COLLECTIVE_THREADS_LOST = 2,
	COLLECTIVE_LATE_ATTACH = 8,
	COLLECTIVE_GROUPED = 16,
	COLLECTIVE_GRAPH = 32,
};

enum off_cpu_flag {
	OFF_PREEMPTED = 1,
	OFF_IOWAIT = 2,
	OFF_WOKEN_BY_CHILD = 4,
	OFF_WOKEN_BY_SELF = 8,
	OFF_THROTTLED = 16, /* runnable, but the CPU quota of its control group was used up */
};

/* An event of the machine that affected a process. */
enum host_kind {
	HOST_NONE,
	HOST_THROTTLED,		/* from cpu.stat, read by user space */
	HOST_FILE_WAIT,		/* this and the next: from struct off_event */
	HOST_SOCKET_WAIT,
	HOST_BLOCK_IO,		/* a slow request of a disk */
	HOST_MAJOR_FAULT,	/* from struct off_event */
	HOST_RECLAIM,
	HOST_COMPACTION,
	HOST_OOM_KILL,
	HOST_EXEC,
	HOST_FORK,
	HOST_EXIT,
	HOST_SIGNAL,
	HOST_RETRANSMIT,	/* from the map of sockets */
	HOST_MIGRATION,		/* from the map of processes */
	HOST_DRIVER_CALL,	/* a slow ioctl of the GPU driver */
};

/* The task of a probe, encoded in its cookie: bits 0-7 op, 8-15 category inside the call, 16-31 symbol, 32-39 action,
 * then six numbers of arguments of 4 bits each (1 is the first argument, 0 there is none): 40 count or bytes, 44
 * datatype, 48 reduction, 52 peer or root, 56 communicator, 60 stream. */
enum action {
	ACTION_CALL,		/* a call of a class: its category is charged until it returns */
	ACTION_COLLECTIVE,	/* an arrival */
	ACTION_GROUP_START,
	ACTION_GROUP_END,
	ACTION_INIT_RANK,	/* (comm *, nranks, unique id by value, rank) */
	ACTION_INIT_SCALABLE,	/* (comm *, nranks, rank, n ids, ids) */
	ACTION_INIT_ALL,	/* (comm *, n, devices) */
	ACTION_SPLIT,		/* (comm, colour, key, comm *) */
	ACTION_SHRINK,		/* (comm, excluded ranks, n, comm *) */
	ACTION_GROW,		/* (comm, nranks, unique id *, rank, comm *) */
	ACTION_DESTROY,		/* (comm) */
	ACTION_SET_DEVICE,	/* (device) */
	ACTION_CAPTURE_BEGIN,	/* (stream, ...) */
	ACTION_CAPTURE_END,	/* (stream, graph *) */
	ACTION_INSTANTIATE,	/* (executable graph *, graph, ...) */
	ACTION_GRAPH_LAUNCH,	/* (executable graph, stream) */
	ACTION_ENQUEUE,		/* enqueues work on a stream that other ranks take part in, but is not a round */
	ACTION_GROUP_SIMULATE,	/* ends a group without running its calls */
};

struct arrival { /* one collective or point-to-point call */
	s64 ts_ns;
	u64 comm_hash;
	u64 comm; /* the process's handle */
	s64 seq;
	s64 count;
	u64 stream;
	s64 wait_enter_ns;
	s64 wait_leave_ns;
	u32 pid;
	u32 tid;
	s32 comm_rank;
	s32 nranks;
	s32 peer_rank;
	u16 op;
	u8 datatype;
	u8 reduce_op;
	u32 flags;
	u32 n_threads; /* GPU threads that the ledger follows */
	u32 n_syncs;
	u32 n_allocs;
	u32 n_copies;
	u32 n_launches;
	s64 ledger_ns[N_CATEGORIES]; /* of the process; column i is category i + 1 */
	s32 device;
	u32 spare;
};
_Static_assert(sizeof(struct arrival) == 248, "arrival: 256 with the ring's header");

enum event_kind {
	EVENT_NONE,
	EVENT_CALL,		/* struct call_event: slow or failed */
	EVENT_OFF_CPU,		/* struct off_event: long */
	EVENT_PROCESS,		/* struct life_event: first seen */
	EVENT_EXEC,		/* struct life_event: another program in the same process */
	EVENT_EXIT,		/* struct life_event: the last thread has gone */
	EVENT_COMM_BORN,	/* struct life_event */
	EVENT_COMM_DEAD,	/* struct life_event */
	EVENT_HOST = 12,	/* struct host_event */
	/* Raw events of the ledger, only while record_all is set: struct raw_event */
	EVENT_ENTER = 16,	/* a call of a class begins, `category` is charged from now on */
	EVENT_RETURN,		/* it ends, or turns out to have been left without a return */
	EVENT_OFF,		/* the thread leaves the CPU, blocked or runnable according to `category` */
	EVENT_ON,		/* it runs again */
	EVENT_WAKEUP,		/* it is runnable; `category` CHILD: it had waited for a child since EVENT_OFF */
	EVENT_BORN,		/* the ledger follows the thread from now on */
	EVENT_DEAD,		/* the ledger no longer follows the thread */
	EVENT_SNAPSHOT,		/* an arrival copies the ledger */
};

#define EVENT_HEAD                                                              \
	s64 ts_ns;                                                              \
	s64 duration_ns;                                                        \
	u32 pid;                                                                \
	u32 tid;                                                                \
	u16 kind;                                                               \
	u16 op;                                                                 \
	u16 symbol;                                                             \
	u8 category;                                                            \
	u8 flags

struct event { /* any of the following */
	EVENT_HEAD;
	u64 rest[11];
};

struct call_event {
	EVENT_HEAD;
	s64 count_bytes;
	u64 stream;
	s32 result;
	s32 device;
	u64 address;	/* of the memory allocated, freed or copied to; 0 none */
	u64 handle;	/* kernel, graph, event or module that the call is about; 0 none */
	u32 grid[3];
	u32 block[3];
	u8 direction;	/* names.Direction */
	u8 host_memory; /* names.HostMemory */
	u8 memory;	/* names.MemoryKind */
	u8 spare1[5];
	u64 stack;	/* hash of struct stack; 0 none */
	u64 spare[1];
};

struct off_event {
	EVENT_HEAD;
	s64 runnable_ns;
	s32 syscall_nr;
	s32 waker_pid;
	s32 waker_tid;
	s32 by_pid;
	char by_comm[16];
	u64 inode;	/* of the file that it was blocked on; 0 none, or not known */
	u32 device;	/* of that file, as the kernel numbers devices; 0: it is a socket */
	s32 fd;
	char file[24];	/* the last part of its name; of a socket, struct ends */
	u64 stack;	/* hash of struct stack; 0 none */
};

struct ends { /* of a connection */
	u16 family;
	u16 peer_port; /* as in the packet */
	u16 own_port;
	u16 spare;
	u8 peer[16];
};

struct host_event {
	EVENT_HEAD;	/* op: enum host_kind */
	u64 cgroup;	/* number of the control group (v2) */
	s64 value;	/* bytes, signal, exit code, pages reclaimed */
	u32 device;
	s32 by_pid;
	char by_comm[16];
	u32 request;	/* of a disk: REQ_OP_*; of a GPU driver: the symbol of the ioctl */
	u32 spare[3];
	char name[32];	/* of the process, or of the program that it becomes */
};

struct life_event {
	EVENT_HEAD;
	u64 comm_hash;
	u64 comm;
	u64 parent_hash;
	s32 comm_rank; /* -1 unknown, as in a split */
	s32 nranks;
	s32 parent_rank;
	s32 parent_nranks;
	s32 color;
	s32 key;
	s32 n_splits; /* of the parent, not counting this communicator */
	s32 device;
	char name[16];
	u64 spare[2];
};

struct raw_event {
	EVENT_HEAD;
	u64 sp;
	s32 syscall_nr;
	u32 state;
	u64 spare[9];
};

#define ASSERT_EVENT(s) _Static_assert(sizeof(struct s) == 120, #s ": 128 with the ring's header")
ASSERT_EVENT(event);
ASSERT_EVENT(call_event);
ASSERT_EVENT(off_event);
ASSERT_EVENT(life_event);
ASSERT_EVENT(raw_event);
ASSERT_EVENT(host_event);

/* Sums kept in the kernel and read once a second. */
struct host_sums { /* of a process */
	u64 n_migrations;
	u64 n_short[2];		/* reclaim, compaction: stalls too short for single records */
	u64 short_ns[2];
};

#define N_DELAYS 32 /* a power of two */
struct disk_key {
	u32 pid;
	u32 device;
	u32 request;
	u32 spare;
};

struct disk_sums { /* requests of a process to a disk */
	u64 n;
	u64 n_bytes;
	u64 ns;
	u64 delays[N_DELAYS];	/* how many took 2^i to 2^(i+1) us */
};

struct resent { /* segments that a socket has sent again */
	u64 n;
	s64 first_ns;
	s64 last_ns;
	struct ends ends;
	char interface[16];
};

/* Addresses and field offsets of a Python interpreter (src/stallscope/capture/stacks/layouts.py): addresses, then
 * offsets. */
struct python {
	u64 interpreters;	/* where the pointer to the main interpreter lies */
	u64 code_type;		/* PyCode_Type */
	u32 threads_head;
	u32 thread_next;
	u32 thread_id;
	u32 current_frame;
	u32 cframe;
	u32 frame_previous;
	u32 frame_code;
	u32 frame_instr;
	u32 frame_owner;
	u32 first_unowned;
	u32 code_filename;
	u32 code_qualname;
	u32 code_linetable;
	u32 code_first_line;
	u8 has_cframe;
	u8 has_owner;
	u8 is_index;		/* frame_instr is a 32-bit number, not an address */
	u8 frame_bytes;
	u8 spare[4];
};

#define N_FRAMES 40
struct stack_frame {
	u64 code;		/* address of the code object */
	u64 instruction;	/* address, or index */
	u64 filename;		/* identity of the code object: addresses of its strings and table */
	u64 qualname;
	u64 linetable;
	s32 first_line;
	u32 spare;
};

struct stack { /* of the ring `stacks`: emitted before the first event that has its hash */
	u64 hash;
	u32 pid;
	u32 tid;
	u32 n;
	u32 is_cut;		/* there were more */
	struct stack_frame frames[N_FRAMES];
	u64 spare[12];
};
_Static_assert(sizeof(struct stack) == 2040, "stack: 2048 with the ring's header");

struct registers { /* in user mode: the registers that lead to the caller */
	u64 ip;
	u64 sp;
	u64 bp;
	u64 bx;
	u64 r12;
	u64 r13;
	u64 r14;
	u64 r15;
};

#define N_HOOKED 6
struct hooked_return {
	u64 at;			/* address on the stack of the return address that a probe has replaced; 0 none */
	u64 address;		/* the original return address */
};

#define N_STACK_BYTES 3896
struct native { /* of the ring `natives`: a copy of the stack, to be walked by user space */
	u64 hash;		/* of the whole stack, as in events */
	u64 python;		/* hash of struct stack; 0 none */
	u32 pid;
	u32 tid;
	u32 n_bytes;		/* of the stack, from sp on */
	u32 is_return;		/* ip is a return address */
	struct registers registers;
	struct hooked_return hooked[N_HOOKED];
	u8 stack[N_STACK_BYTES];
};
_Static_assert(sizeof(struct native) == 4088, "native: 4096 with the ring's header");

#define N_RETURNS 16
struct native_shape { /* return address locations of a walked stack: the same addresses there mean the same stack */
	u64 check;		/* hash over them */
	u16 n;
	u16 is_known;		/* 0: emitted, and not yet walked */
	u32 spare;
	u16 at[N_RETURNS];	/* in words from sp on */
};

/* A request for a thread by user space, and the reply: this, pieces of memory up to the ends of pages, this again. */
struct peek_request {
	u64 address;		/* of the memory; 0: start at the stack pointer */
	u32 tid;
	u32 n_pieces;
};

struct peek_thread {
	struct registers registers; /* good while it is not on a CPU */
	u64 n_switches;		/* times that it has left the CPU */
	u32 tid;
	s32 syscall_nr;		/* that it is in; -1 none */
	u32 is_on_cpu;
	u32 spare;
	struct hooked_return hooked[N_HOOKED]; /* innermost first */
};

/* A GPU thread in the view of other threads. `state` bytes of all slots are the process's word. */
struct slot {
	u32 tid;		/* 0: free */
	u8 call;		/* category inside the outermost call of a class; 0 outside */
	u8 off;			/* category of the reason for being off the CPU; 0 while it runs */
	u8 blocked;		/* the last reason to block */
	u8 waker_flags;
	s64 last_hook_ns;	/* last time it made a traced call */
	u16 class_op;		/* outermost call of a class that it is inside */
	u16 nccl_op;		/* outermost NCCL call that it is inside */
	s32 syscall_nr;		/* it blocked in, or -1 */
	s64 class_since_ns;
	s64 nccl_since_ns;
	s64 off_ns;		/* it left the CPU */
	s64 base_ns;		/* when own_base and low_base were taken */
	s64 woken_ns;		/* it became runnable; 0 not yet */
	s64 on_ns;		/* its time on the CPU has been compared with the scheduler's account up to this time; 0 never */
	u64 on_runtime;		/* that account then */
	u64 off_runtime;	/* and when it left the CPU */
	u64 off_run_delay;	/* and of its time in the run queue */
	u64 own_base;		/* the process's account of the thread's state then */
	u64 low_base[4];	/* the process's accounts of categories 1 to 4 then */
	u64 hook_runtime;	/* the scheduler's account of its time on the CPU at its last traced call */
	s32 waker_pid;
	s32 waker_tid;
	s32 by_pid;
	u32 is_mending;		/* repair_missed_switch() is at work; a tick may come in between */
	u32 is_idle;		/* parked, and makes no calls any more: it is left out */
	u32 last_way_ns;	/* at its last probe, see way_ns */
	u32 walk_apart_ns;	/* after walked_ns + this time it is walked again at the same place */
	u8 off_category;	/* category of the whole interval off the CPU, up to the wakeup */
	u8 off_flags;		/* enum off_cpu_flag */
	u8 has_yielded;		/* it gave the CPU away by sched_yield */
	u8 has_base;		/* own_base and low_base are good */
	char by_comm[16];
	u64 scheduler_ns;	/* of the programs that run when it leaves the CPU and returns */
	u64 way_ns[N_GROUPS];	/* time that probes took to find process and thread, by group; twice for a call with its return */
	u64 inside_ns[N_GROUPS];	/* time in the calls of each group */
	u64 stack;		/* of Python when it left the CPU: its hash; 0 none */
	s64 walked_ns;		/* when that was last read */
	u64 walked_at;		/* and where in the program */
	u32 n_contained;	/* calls of GROUP_RUNTIME_WAITS that contained a synchronise call of the driver */
	u32 n_bare;		/* and that contained no such call */
};

/* A traced process. Accounts are sums of time stamps: add now to the account of the present state. */
struct process {
	u64 word;		/* byte i: category of slot i */
	u64 begun;		/* changes begun and ended: equal while no thread is between the swap and the sums */
	u64 ended;
	u64 ns[N_CATEGORIES + 1];	/* by category */
	s64 born_ns;
	s64 n_collectives;
	s64 n_synced;		/* n_collectives when the last synchronise call ended */
	s64 wait_enter_ns;
	s64 wait_leave_ns;
	s64 capture_ns;		/* start of the present CUDA graph capture; 0 none */
	u64 reported_ns[N_CATEGORIES];	/* accounts in the last arrival: column i is category i + 1 */
	u64 n_lost;		/* times a GPU thread found no slot */
	u32 n_syncs;
	u32 n_allocs;
	u32 n_copies;
	u32 n_launches;
	u64 uses_nccl;		/* it has called NCCL */
	struct slot slots[N_SLOTS];
};
_Static_assert(sizeof(struct slot) == 360, "slot");
_Static_assert(sizeof(struct process) == 8 * (3 + 17 + 7 + 17) + 16 + N_SLOTS * 360, "process");

enum direction {
	HOST_TO_HOST = 1, /* cudaMemcpyKind + 1 */
	HOST_TO_DEVICE,
	DEVICE_TO_HOST,
	DEVICE_TO_DEVICE,
	BY_ADDRESS,
	PEER,
};

enum host_memory {
	HOST_UNKNOWN,
	HOST_PAGEABLE,
	HOST_PINNED,
};

enum memory_kind {
	MEMORY_NONE,
	MEMORY_DEVICE,
	MEMORY_POOL,
	MEMORY_MANAGED,
	MEMORY_HOST,
	MEMORY_REGISTERED,
	MEMORY_VMM,
	MEMORY_ARRAY,
};

/* How the arguments of a call are read. */
enum shape {
	SHAPE_PLAIN,
	SHAPE_COPY,		/* addresses and bytes are arguments */
	SHAPE_RUNTIME_3D,	/* (cudaMemcpy3DParms *) */
	SHAPE_RUNTIME_3D_PEER,	/* (cudaMemcpy3DPeerParms *) */
	SHAPE_DRIVER_2D,	/* (CUDA_MEMCPY2D *) */
	SHAPE_DRIVER_3D,	/* (CUDA_MEMCPY3D *), CUDA_MEMCPY3D_PEER has the same offsets */
	SHAPE_LAUNCH_RUNTIME,	/* (function, grid, block, ...): dim3 by value */
	SHAPE_LAUNCH_DRIVER,	/* (function, grid x, y, z, block x, y, z, ...) */
	SHAPE_LAUNCH_CONFIG,	/* (cudaLaunchConfig_t * or CUlaunchConfig *, function, ...) */
	SHAPE_OUT,		/* (handle *, ...) */
	SHAPE_ALLOC,		/* (address *, ...) */
	SHAPE_ALLOC_PITCH,	/* (address *, pitch *, width, height) */
	SHAPE_ALLOC_3D,		/* (cudaPitchedPtr *, cudaExtent by value) */
	SHAPE_CREATE,		/* (handle *, bytes, CUmemAllocationProp *, ...) */
	SHAPE_REGISTER,		/* (address, bytes, ...) */
	SHAPE_FREE,		/* (address or handle, ...) */
	SHAPE_RETAIN,		/* (handle *, ...): of existing memory, which then needs one more release to be freed */
};

/* When probes are on: always, or while they cost a thread little. */
enum hook_group {
	GROUP_ALWAYS,
	GROUP_COPIES,		/* asynchronous copies */
	GROUP_HOT,
	GROUP_RUNTIME_WAITS,	/* synchronise calls of the runtime: redundant where each contains a probed driver call */
	GROUP_GRAPH_LAUNCHES,	/* redundant while no process uses NCCL */
	GROUP_WAITS,		/* other synchronise calls that wait for all work, or for one stream or event */
};

/* The kernel side's description of a function, in addition to its cookie; numbers of arguments, 1 is the first, 0
 * there is none. */
struct function {
	u8 shape;
	u8 group;
	u8 direction; /* if the name implies it */
	u8 memory;
	u8 count;	/* bytes, or units of `scale` bytes */
	u8 scale;
	u8 rows;	/* multiplies it */
	u8 kind;	/* cudaMemcpyKind */
	u8 target;
	u8 source;
	u8 stream;
	u8 handle;
	u8 out;		/* where the call writes its result */
	u8 n_stack;	/* arguments on the stack that matter (x86-64) */
	u8 spare[2];
};

#define FIRST_BUCKET_BITS 7 /* bucket i: shorter than 2^(7 + i) ns, the last one also above */
#define N_BUCKETS 32

struct operation_key {
	u32 tgid;
	u16 symbol;
	u8 direction;
	u8 host_memory;
};

struct operation { /* all calls of a function by a process so far */
	u64 n;
	u64 n_failed;
	u64 total_ns;
	u64 max_ns;	/* the first call left out */
	u64 first_ns;
	u64 count_bytes;
	u32 histogram[N_BUCKETS];
};

struct balance_key {
	u32 tgid;
	s16 device; /* -1: none, or unknown */
	u16 memory;
};

struct balance { /* memory of a kind that a process holds */
	s64 live_bytes;
	s64 n_live;
	s64 peak_bytes;
	u64 n_allocs;
	u64 allocated_bytes;
	u64 n_frees;
	u64 n_unknown_frees;
};

/* The ioctls of the GPU driver are also symbols, from cfg_first_ioctl on: IOCTL_NUMBERS for each driver. */
#define IOCTL_NUMBERS 256
#define IOCTL_OTHER 255 /* a number that is unknown for the driver */

enum driver { /* by the major number of a device */
	DRIVER_NONE,
	DRIVER_NVIDIA,
	DRIVER_UVM,
	DRIVER_NVSWITCH,
	DRIVER_NVLINK,
	DRIVER_ANOTHER,
};

/* Counted per CPU, never silently lost. */
enum counter {
	LOST_ARRIVAL,		/* ring full */
	LOST_CALL,
	LOST_OFF_CPU,
	LOST_LIFE,
	LOST_RAW,
	LOST_PROCESS,		/* no room for another process */
	LOST_THREAD,		/* no slot for another GPU thread */
	LOST_COMM,		/* no room for another communicator */
	LOST_CHANGE,		/* a ledger change gave up: the thread's next change corrects it */
	TORN_SNAPSHOT,
	MISSED_ON,		/* a switch to a GPU thread that no program saw: found and corrected later */
	MISSED_WAKEUP,
	STOLEN,			/* times a thread counted as running, unlike in the scheduler's account: corrected */
	UNGROUPED,		/* calls in a group too large to hold: each has its own arrival time */
	UNGRAPHED,		/* calls on more communicators than are followed through a CUDA graph */
	LOST_HOST,
	LOST_OPERATION,		/* calls without a statistic: no room for another function of a process */
	LOST_ALLOCATION,	/* no room for another allocation: the balance is too low */
	RAISED,			/* slow calls without a record, because the threshold was raised for lack of room */
	LOST_STACK,		/* Python's or native */
	REFUSED_STACK,		/* frames that are not valid */
	LOST_REQUEST,		/* requests and tokens of inference engines */
	N_COUNTERS,
};

#endif
