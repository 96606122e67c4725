/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The Python frames of the thread that runs this: exact, since the thread itself reads them.
 *
 * User space provides the field offsets, by process (src/stallscope/capture/stacks/). The thread's state is found
 * among the interpreter's states by the thread pointer. Every code object must have the type of a code object; invalid
 * data gives no stack at all. A stack is identified by a hash over its frames and the identities of their code
 * objects, and is emitted once. x86-64 only: elsewhere there are none.
 */
#ifndef STALLSCOPE_PYTHON_H
#define STALLSCOPE_PYTHON_H

#define N_PYTHONS 1024
#define N_STACKS_SEEN 16384
#define N_THREAD_STATES 64
#define FRAME_BYTES 128
#define CODE_BYTES 256
#define WALK_APART_NS 5000000 /* a thread that blocks more often is not walked each time */
#define WALK_SHARE 4000 /* only after this multiple of the last walk's duration at the same place ... */
#define MAX_WALK_NS 12500 /* ... had no interrupt come in between */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_PYTHONS);
	__type(key, u32);
	__type(value, struct python);
} pythons __weak SEC(".maps");

struct walk {
	u32 is_busy; /* a walk was interrupted by another on this CPU, which gives up */
	u32 spare;
	struct stack stack;
	u8 frame[FRAME_BYTES];
	u8 code[CODE_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct walk);
} walks __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_STACKS_SEEN);
	__type(key, u64);
	__type(value, u8);
} stacks_seen __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} stacks __weak SEC(".maps");

struct thread_struct___fs {
	unsigned long fsbase;
} CORE;

struct task_struct___fs {
	struct thread_struct___fs thread;
} CORE;

INLINE u64 mix_in(u64 hash, u64 value)
{
	hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 29;
}

/* The calling thread's state: the state with the thread's pointer, which Python keeps as pthread_self(). */
INLINE u64 thread_state(const struct python *o)
{
#ifdef __TARGET_ARCH_x86
	struct task_struct___fs *task = (void *)bpf_get_current_task_btf();
	u64 self = task->thread.fsbase, at;

	if (!self)
		return 0;
	at = user_word(o->interpreters);
	at = at ? user_word(at + o->threads_head) : 0;
	for (int i = 0; i < N_THREAD_STATES && at; i++) {
		if (user_word(at + o->thread_id) == self)
			return at;
		at = user_word(at + o->thread_next);
	}
#endif
	return 0;
}

#define FIELD(type, bytes, at, mask) (*(type *)((bytes) + MASK(at, mask)))

/* One frame. Returns the address of the previous frame, 0 at the end, 1 if the data is not valid. */
INLINE u64 walk_frame(struct walk *w, const struct python *o, u64 at)
{
	u64 code, before;
	struct stack_frame *f;
	u32 n = w->stack.n;

	if (at & 7 || bpf_probe_read_user(w->frame, MASK(o->frame_bytes, 127), (void *)at))
		return 1;
	before = FIELD(u64, w->frame, o->frame_previous, 0x78);
	if (o->has_owner && FIELD(u8, w->frame, o->frame_owner, 0x7f) >= o->first_unowned)
		return before;
	code = FIELD(u64, w->frame, o->frame_code, 0x78) & ~3ULL;
	if (!code || code & 7 || bpf_probe_read_user(w->code, CODE_BYTES - 96, (void *)code))
		return 1;
	if (FIELD(u64, w->code, 8, 0xf8) != o->code_type || n >= N_FRAMES)
		return 1;
	f = &w->stack.frames[MASK(n, 63)];
	if (n >= N_FRAMES)
		return 1;
	f->code = code;
	f->instruction = FIELD(u64, w->frame, o->frame_instr, 0x78);
	if (o->is_index)
		f->instruction = (u32)f->instruction;
	f->filename = FIELD(u64, w->code, o->code_filename, 0xf8);
	f->qualname = FIELD(u64, w->code, o->code_qualname, 0xf8);
	f->linetable = FIELD(u64, w->code, o->code_linetable, 0xf8);
	f->first_line = FIELD(s32, w->code, o->code_first_line, 0xfc);
	f->spare = 0;
	w->stack.hash = mix_in(mix_in(w->stack.hash, code), f->instruction);
	w->stack.hash = mix_in(mix_in(w->stack.hash, f->qualname), f->linetable);
	w->stack.n = n + 1;
	return before;
}

/* The stack of the calling thread as a hash; 0: without a reliable stack. */
__weak __attribute__((noinline)) u64 python_stack(void)
{
	u64 id = bpf_get_current_pid_tgid(), state, at, hash;
	u32 tgid = id >> 32, zero = 0, i;
	struct python *o = bpf_map_lookup_elem(&pythons, &tgid);
	struct walk *w;
	u8 one = 1;

	if (!o)
		return 0;
	w = bpf_map_lookup_elem(&walks, &zero);
	if (!w || __sync_val_compare_and_swap(&w->is_busy, 0, 1))
		return 0;
	w->stack.hash = tgid;
	w->stack.pid = tgid;
	w->stack.tid = id;
	w->stack.n = 0;
	w->stack.is_cut = 0;
	state = thread_state(o);
	at = 0;
	if (state && o->has_cframe)
		state = user_word(state + o->cframe);
	if (state)
		at = user_word(state + o->current_frame);
	for (i = 0; i < N_FRAMES + 8 && at > 1; i++) {
		if (w->stack.n >= N_FRAMES) {
			w->stack.is_cut = 1;
			break;
		}
		at = walk_frame(w, o, at);
	}
	if (at > 1)
		w->stack.is_cut = 1;
	hash = at == 1 || !w->stack.n ? 0 : w->stack.hash;
	if (at == 1)
		count(REFUSED_STACK);
	if (hash && !bpf_map_lookup_elem(&stacks_seen, &hash)) {
		if (bpf_ringbuf_output(&stacks, &w->stack, sizeof(w->stack), wakeup(&stacks))) {
			count(LOST_STACK);
			hash = 0;
		} else {
			bpf_map_update_elem(&stacks_seen, &hash, &one, BPF_ANY);
		}
	}
	w->is_busy = 0;
	return hash;
}

#endif
