// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Requests that the processes of an inference engine answer over HTTP/1.1 and gRPC, on TCP and Unix sockets. User space
 * attaches these programs when it finds an engine; its processes are in the map `engines`. http2.h reads gRPC.
 *
 * A request begins when a read on a connection returns "METHOD /path HTTP/1.". Its response ends by its length, by its
 * last chunk, or with the connection. Each write of a body without a length is a token. The programs read headers and
 * the first and last bytes of a write, and keep only method, path, status and lengths. */
#include "serving.h"
#include "host.h"

const volatile struct {
	u64 n_bytes;
	struct request_event request_event[0];
	struct token_event token_event[0];
	struct connection connection[0];
	struct stream_key stream_key[0];
	struct stream stream[0];
	struct frames frames[0];
	struct fields fields[0];
	struct message message[0];
	struct http2 http2[0];
} serving_layouts = { .n_bytes = sizeof(struct request_event) };

#define N_CONNECTIONS 16384
#define N_PORTS 65536
#define HEADER_BYTES 4096 /* a power of two: a longer header is read as far as this */
#define MSG_PEEK 2
#define EAGAIN 11
#define AF_UNIX 1
#define MAPPED_IPV4 0xffff0000 /* the third word of ::ffff:0:0, in the order of a little-endian machine */
#define TCP_ESTABLISHED 1
#define TCP_FIN_WAIT1 4
#define TCP_CLOSE 7
#define TCP_LAST_ACK 9
#define FEW_BYTES 16
#define FOLLOW_AFTER_NS 50000000 /* the ledger follows the writers of tokens: a search for each token costs 0.3 us */
#define LAST_BYTES 8

struct user_iovec {
	u64 base;
	u64 n_bytes;
};

struct user_msghdr { /* on 64-bit architectures */
	u64 name;
	u64 name_bytes;
	u64 iov;
	u64 n_iov;
};

#ifdef __TARGET_ARCH_arm64
#define pt_regs___third pt_regs___kernel
#define SECOND regs[1]
#define THIRD regs[2]
#else
struct pt_regs___third {
	unsigned long dx;
} CORE;
#define SECOND si
#define THIRD dx
#endif

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} served_requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} served_tokens SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_CONNECTIONS);
	__type(key, u64); /* address of the socket */
	__type(value, struct connection);
} connections SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_CONNECTIONS);
	__type(key, u64);
	__type(value, s64);
} early_arrivals SEC(".maps"); /* on connections that the process has not read from yet */

/* The ports on which engines have read a request, a bit for each: this is checked at every arrival of data on the
 * machine, where a hash map costs 0.2 us. Bits are never cleared. */
static u64 serving_ports[N_PORTS / 64];

INLINE bool is_serving_port(u16 port)
{
	return serving_ports[MASK(port >> 6, N_PORTS / 64 - 1)] >> (port & 63) & 1;
}

struct scratch {
	u8 header[2 * HEADER_BYTES];
	struct connection fresh;
	struct http2 fresh_http2;
	struct stream fresh_stream;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

INLINE struct scratch *scratch(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

/* ---- headers ---- */

struct parse {
	struct scratch *s;
	u64 last;	/* the last 8 bytes */
	s64 length;	/* -1: none stated */
	u32 header_bytes; /* 0: its end is not among them */
	u32 is_in_length;
	u32 is_chunked;
};

#define WORD(a, b, c, d, e, f, g, h)                                                                          \
	((u64)(h) << 56 | (u64)(g) << 48 | (u64)(f) << 40 | (u64)(e) << 32 | (u64)(d) << 24 | (u64)(c) << 16 | \
	 (u64)(b) << 8 | (u64)(a))
#define LOWER_CASE 0x2020202020202020ULL /* - : and digits have this bit, as lower-case letters have */

INLINE u64 word_at(const struct scratch *s, u32 at)
{
	u64 word;

	__builtin_memcpy(&word, &s->header[MASK(at, HEADER_BYTES - 1)], sizeof(word));
	return word;
}

static long parse_byte(u32 at, struct parse *p)
{
	u8 byte = p->s->header[at & (2 * HEADER_BYTES - 1)];
	u64 first, second;

	p->last = p->last << 8 | byte;
	if (p->is_in_length) {
		if (byte >= '0' && byte <= '9')
			p->length = (p->length < 0 ? 0 : p->length) * 10 + (byte - '0');
		else if (byte == '\r')
			p->is_in_length = 0;
	}
	if (byte != '\n')
		return 0;
	if ((p->last & 0xffffffff) == 0x0d0a0d0a) {
		p->header_bytes = at + 1;
		return 1;
	}
	first = word_at(p->s, at + 1) | LOWER_CASE;
	second = word_at(p->s, at + 9) | LOWER_CASE;
	if (first == WORD('c', 'o', 'n', 't', 'e', 'n', 't', '-') &&
	    (second & ~0ULL >> 8) == (WORD('l', 'e', 'n', 'g', 't', 'h', ':', 0)))
		p->is_in_length = 1;
	if (first == WORD('t', 'r', 'a', 'n', 's', 'f', 'e', 'r') && second == WORD('-', 'e', 'n', 'c', 'o', 'd', 'i', 'n'))
		p->is_chunked = 1;
	return 0;
}

INLINE void parse_header(struct parse *p, struct scratch *s, u32 n)
{
	p->s = s;
	p->last = 0;
	p->length = -1;
	p->header_bytes = p->is_in_length = p->is_chunked = 0;
	bpf_loop(n > HEADER_BYTES ? HEADER_BYTES : n, parse_byte, p, 0);
}

/* The number of letters of a method, if the bytes are the beginning of a request: "GET /"; otherwise 0. */
INLINE u32 method_bytes(const struct scratch *s)
{
	u64 word = word_at(s, 0);

	if ((word & 0xffffffffff) == WORD('G', 'E', 'T', ' ', '/', 0, 0, 0) ||
	    (word & 0xffffffffff) == WORD('P', 'U', 'T', ' ', '/', 0, 0, 0))
		return 3;
	word &= 0xffffffffffff;
	if (word == WORD('P', 'O', 'S', 'T', ' ', '/', 0, 0) || word == WORD('H', 'E', 'A', 'D', ' ', '/', 0, 0))
		return 4;
	return 0;
}

struct copy {
	struct scratch *s;
	struct waiting *w;
	u32 from;
	u32 hash; /* FNV-1a */
};

static long copy_byte(u32 at, struct copy *c)
{
	u8 byte = c->s->header[MASK(c->from + at, 2 * HEADER_BYTES - 1)];

	if (at >= N_PATH - 1 || byte <= ' ' || byte == '?' || byte > '~')
		return 1;
	c->w->path[MASK(at, N_PATH - 1)] = byte;
	c->hash = (c->hash ^ byte) * 16777619u;
	return 0;
}

/* Copies method and path of a request line. The query part of the path is left out. */
INLINE bool request_line(struct scratch *s, struct waiting *w)
{
	u32 n = method_bytes(s);
	struct copy c = { .s = s, .w = w, .from = n + 1, .hash = 2166136261u };

	if (!n)
		return false;
	__builtin_memset(w->method, 0, sizeof(w->method));
	__builtin_memset(w->path, 0, sizeof(w->path));
	__builtin_memcpy(w->method, s->header, 3);
	if (n == 4)
		w->method[3] = s->header[3];
	bpf_loop(N_PATH, copy_byte, &c, 0);
	w->path_hash = c.hash;
	return true;
}

/* ---- requests ---- */

INLINE void report_request(const struct request_event *r)
{
	struct request_event *e = bpf_ringbuf_reserve(&served_requests, sizeof(*e), 0);

	if (!e) {
		count(LOST_REQUEST);
		return;
	}
	__builtin_memcpy(e, r, sizeof(*e));
	bpf_ringbuf_submit(e, wakeup(&served_requests));
}

/* The time between two tokens of a response. */
INLINE void gap(struct request_event *r, s64 now)
{
	struct token_event *e;
	s64 gap = now - r->last_ns;

	if (gap > r->gap_ns) {
		r->gap_ns = gap;
		r->gap_at_ns = r->last_ns;
	}
	e = bpf_ringbuf_reserve(&served_tokens, sizeof(*e), 0);
	if (!e) {
		count(LOST_REQUEST);
		return;
	}
	e->ts_ns = now;
	e->gap_ns = gap;
	e->pid = r->pid;
	e->path_hash = r->path_hash;
	bpf_ringbuf_submit(e, wakeup(&served_tokens));
}

INLINE void open_request(struct connection *c, const struct waiting *from, u8 flags)
{
	u64 id = bpf_get_current_pid_tgid();
	struct request_event *r = &c->request;

	__builtin_memset(r, 0, sizeof(*r));
	r->ts_ns = from->ts_ns;
	r->read_ns = from->read_ns;
	r->complete_ns = from->complete_ns;
	r->request_bytes = from->request_bytes;
	r->id = from->read_ns ^ id << 20;
	r->pid = id >> 32;
	r->tid = id;
	r->client = c->client;
	r->flags = flags | REQUEST_UNANSWERED;
	__builtin_memcpy(r->method, from->method, sizeof(r->method));
	__builtin_memcpy(r->path, from->path, sizeof(r->path));
	r->path_hash = from->path_hash;
	c->has_header = c->is_chunked = 0;
	c->answer_left = -1;
	c->full_since_ns = 0;
}

INLINE void end_request(struct connection *c, s64 now, u8 flags)
{
	struct waiting next;

	c->request.end_ns = now;
	c->request.flags |= flags;
	report_request(&c->request);
	c->request.ts_ns = 0;
	if (!c->n_waiting)
		return;
	__builtin_memcpy(&next, &c->waiting[0], sizeof(next));
	__builtin_memmove(&c->waiting[0], &c->waiting[1], (N_WAITING - 1) * sizeof(next));
	c->n_waiting--;
	open_request(c, &next, REQUEST_PIPELINED);
}

INLINE int has_closed(struct sock *sk)
{
	struct connection *c;
	u64 key = (u64)sk;
	bool is_whole;

	c = bpf_map_lookup_elem(&connections, &key);
	if (!c)
		return 0;
	if (c->request.ts_ns) {
		is_whole = c->has_header && !c->is_chunked && c->answer_left < 0;
		c->n_waiting = 0;
		if (c->full_since_ns)
			c->request.blocked_ns += bpf_ktime_get_ns() - c->full_since_ns;
		end_request(c, bpf_ktime_get_ns(), is_whole ? 0 : REQUEST_ABORTED);
	}
	bpf_map_delete_elem(&connections, &key);
	return 0;
}

/* The process has read the end of the client's data. A Unix socket has no other sign of its end. */
INLINE void client_left(struct sock *sk, struct connection *c)
{
	c->request.flags |= REQUEST_CLIENT_LEFT;
	if (BPF_CORE_READ(sk, __sk_common.skc_family) == AF_UNIX)
		has_closed(sk);
}

struct reading {
	struct connection *c;
	struct scratch *s;
	u64 base;
	s64 ts_ns;
	s64 now;
	u32 n;
	u32 at;
};

/* One request, or a part of the body of a request, of the bytes that a read has returned. */
static long read_part(u32 number, struct reading *r)
{
	struct waiting *w = NULL;
	struct connection *c = r->c;
	struct parse p;
	u32 left = r->n - r->at, n;
	s64 body;
	u8 slot;

	if (r->at >= r->n)
		return 1;
	if (c->body_left > 0) {
		body = c->body_left < left ? c->body_left : left;
		c->body_left -= body;
		r->at += body;
		if (!c->body_left) {
			slot = c->n_waiting;
			if (slot && slot <= N_WAITING)
				c->waiting[MASK(slot - 1, N_WAITING - 1)].complete_ns = r->now;
			else
				c->request.complete_ns = r->now;
		}
		return 0;
	}
	n = left > HEADER_BYTES ? HEADER_BYTES : left;
	if (bpf_probe_read_user(r->s->header, MASK(n, 2 * HEADER_BYTES - 1), (void *)(r->base + r->at)))
		return 1;
	slot = c->n_waiting;
	if (c->request.ts_ns && slot >= N_WAITING)
		return 1;
	w = &c->waiting[MASK(slot, N_WAITING - 1)];
	if (!request_line(r->s, w))
		return 1;
	parse_header(&p, r->s, n);
	if (p.header_bytes) {
		body = p.length > 0 ? p.length : 0;
		c->body_left = body;
		w->request_bytes = p.header_bytes + body;
		r->at += p.header_bytes;
	} else {
		w->request_bytes = left;
		r->at = r->n;
	}
	w->ts_ns = r->ts_ns;
	w->read_ns = r->now;
	w->complete_ns = c->body_left ? 0 : r->now;
	if (c->request.ts_ns && c->has_header && !c->is_chunked && c->answer_left < 0)
		end_request(c, r->now, REQUEST_ABORTED); /* only the end of its connection could end it */
	if (c->request.ts_ns)
		c->n_waiting = slot + 1;
	else
		open_request(c, w, 0);
	return 0;
}

/* The user memory of the read or write that the calling thread is in. */

struct segments {
	u64 iov; /* 0: a single segment */
	u64 n_iov;
	u64 first;
	u64 second;
	u64 last;
	u32 first_bytes;
	u32 second_bytes;
	u32 last_bytes;
};

INLINE bool segments_of(u64 n, struct segments *out)
{
	struct pt_regs___kernel *regs = (struct pt_regs___kernel *)bpf_task_pt_regs(bpf_get_current_task_btf());
	u64 argument = regs->SECOND, iov = 0, n_iov = 0;
	struct user_msghdr header;
	struct user_iovec part;

	out->iov = out->n_iov = 0;
	switch (SYSCALL_NR(regs)) {
	case __NR_read:
	case __NR_write:
	case __NR_recvfrom:
	case __NR_sendto:
		out->first = out->last = argument;
		out->first_bytes = out->last_bytes = n;
		out->second_bytes = 0;
		return true;
	case __NR_readv:
	case __NR_writev:
		iov = argument;
		n_iov = BPF_CORE_READ((struct pt_regs___third *)regs, THIRD);
		break;
	case __NR_recvmsg:
	case __NR_sendmsg:
		if (bpf_probe_read_user(&header, sizeof(header), (void *)argument))
			return false;
		iov = header.iov;
		n_iov = header.n_iov;
		break;
	}
	if (!n_iov || bpf_probe_read_user(&part, sizeof(part), (void *)iov))
		return false;
	out->iov = iov;
	out->n_iov = n_iov;
	out->first = part.base;
	out->first_bytes = part.n_bytes < n ? part.n_bytes : n;
	out->second_bytes = 0;
	if (n_iov > 1 && !bpf_probe_read_user(&part, sizeof(part), (void *)(iov + sizeof(part)))) {
		out->second = part.base;
		out->second_bytes = part.n_bytes;
	}
	if (bpf_probe_read_user(&part, sizeof(part), (void *)(iov + (n_iov - 1) * sizeof(part))))
		return false;
	out->last = part.base;
	out->last_bytes = n_iov == 1 ? out->first_bytes : part.n_bytes;
	return true;
}

/* A random number of the agent's start: without it, the address of a client could be computed from its hash. */
const volatile u32 cfg_client_key __weak = 0;

/* A keyed hash of the client's address without its port; 0: a Unix socket. An IPv4 address that is mapped to IPv6 has
 * the hash of the IPv4 address. The steps that mix are those of MurmurHash3's finalizer. */
INLINE u32 client_of(struct sock *sk)
{
	u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);
	u32 words[4] = {}, hash = cfg_client_key;

	if (family == AF_INET)
		words[3] = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	else if (family == AF_INET6 && bpf_core_field_exists(struct sock_common, skc_v6_daddr))
		BPF_CORE_READ_INTO((struct in6_addr *)words, sk, __sk_common.skc_v6_daddr);
	else
		return 0;
	if (words[2] == MAPPED_IPV4)
		words[2] = 0;
	for (int i = 0; i < 4; i++) {
		hash = (hash ^ words[i] ^ cfg_client_key) * 0x85ebca6bu;
		hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
		hash ^= hash >> 16;
	}
	return hash ? hash : 1;
}

#include "http2.h"

/* Data on these ports is of interest from now on. */
INLINE void add_serving_port(struct sock *sk)
{
	u16 port = BPF_CORE_READ(sk, __sk_common.skc_num);

	if (port && !is_serving_port(port))
		__sync_fetch_and_or(&serving_ports[MASK(port >> 6, N_PORTS / 64 - 1)], 1ULL << (port & 63));
}

/* A connection on which a request begins, or NULL. The scratch area has the first bytes. */
INLINE struct connection *new_connection(struct sock *sk, struct scratch *s)
{
	u64 key = (u64)sk;

	if (!method_bytes(s))
		return NULL;
	__builtin_memset(&s->fresh, 0, sizeof(s->fresh));
	s->fresh.client = client_of(sk);
	bpf_map_update_elem(&connections, &key, &s->fresh, BPF_NOEXIST);
	add_serving_port(sk);
	return bpf_map_lookup_elem(&connections, &key);
}

INLINE bool read_first_bytes(struct scratch *s, const struct segments *g)
{
	return g->first_bytes >= FEW_BYTES && !bpf_probe_read_user(s->header, FEW_BYTES, (void *)g->first);
}

INLINE s64 arrival(s64 *arrived_ns, u64 key, s64 now)
{
	s64 *early = bpf_map_lookup_elem(&early_arrivals, &key);
	s64 ts_ns = *arrived_ns ? *arrived_ns : early ? *early : now;

	if (early)
		bpf_map_delete_elem(&early_arrivals, &key);
	*arrived_ns = 0;
	return ts_ns;
}

INLINE int has_read_http2(struct sock *sk, struct scratch *s, const struct segments *g, long n, s64 now)
{
	struct http2 *h;
	u64 key = (u64)sk;

	h = bpf_map_lookup_elem(&http2s, &key);
	if (!h) {
		if (!is_http2(s))
			return 0;
		h = new_http2(sk, s, now);
		if (!h)
			return 0;
		add_serving_port(sk);
	}
	follow_thread();
	http2_read(h, key, g, n, arrival(&h->arrived_ns, key, now), now);
	return 0;
}

INLINE int has_read(struct sock *sk, long n, int flags)
{
	struct reading r = {};
	struct segments g;
	struct scratch *s;
	u64 key = (u64)sk;

	if (flags & MSG_PEEK || !is_engine() || !(s = scratch()))
		return 0;
	r.c = bpf_map_lookup_elem(&connections, &key);
	if (n <= 0) {
		if (n == 0 && r.c)
			client_left(sk, r.c);
		else if (n == 0 && BPF_CORE_READ(sk, __sk_common.skc_family) == AF_UNIX)
			http2_closed(key);
		return 0;
	}
	r.now = bpf_ktime_get_ns();
	if (!segments_of(n, &g))
		return 0;
	if (!r.c) {
		if (!read_first_bytes(s, &g))
			__builtin_memset(s->header, 0, FEW_BYTES);
		r.c = new_connection(sk, s);
		if (!r.c)
			return has_read_http2(sk, s, &g, n, r.now);
	}
	follow_thread();
	r.s = s;
	r.base = g.first;
	r.n = g.first_bytes;
	r.ts_ns = arrival(&r.c->arrived_ns, key, r.now);
	bpf_loop(2 * N_WAITING, read_part, &r, 0);
	return 0;
}

/* ---- responses ---- */

enum send_kind {
	SEND_BODY,
	SEND_HEADER,	/* the header begins */
	SEND_FRAME,	/* not a token: the size of a chunk, the end of a chunk, a comment, the mark of the end */
	SEND_LAST = 8,	/* with the last chunk */
};

INLINE bool is_hex(u8 c)
{
	return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f');
}

#define DATA_DONE_1 WORD('d', 'a', 't', 'a', ':', ' ', '[', 'D')

/* Whether a write of a body is not a token. header: its first bytes. */
INLINE bool is_frame(struct scratch *s, u64 n)
{
	u32 start = 0, n_hex = 0;

	for (int i = 0; i < 8; i++) {
		if (!is_hex(s->header[i]))
			break;
		n_hex = i + 1;
	}
	if (n_hex < 8 && s->header[MASK(n_hex, 15)] == '\r' && s->header[MASK(n_hex + 1, 15)] == '\n')
		start = n_hex + 2;
	if (n <= start)
		return true; /* the size of a chunk, or the end of its line */
	if (s->header[MASK(start, 15)] == ':')
		return true;
	return word_at(s, start) == DATA_DONE_1;
}

/* The last chunk: "0\r\n\r\n", as a write or behind the end of another chunk; cpp-httplib writes "0\r\n" and "\r\n". */
INLINE bool is_last_chunk(const struct segments *g)
{
	u64 word = 0;

	if (g->last_bytes == 3) {
		bpf_probe_read_user(&word, 3, (void *)g->last);
		return word == WORD('0', '\r', '\n', 0, 0, 0, 0, 0);
	}
	if (g->last_bytes == 5) {
		bpf_probe_read_user(&word, 5, (void *)g->last);
		return word == WORD('0', '\r', '\n', '\r', '\n', 0, 0, 0);
	}
	if (g->last_bytes < 7)
		return false;
	bpf_probe_read_user(&word, 7, (void *)(g->last + g->last_bytes - 7));
	return word == WORD('\r', '\n', '0', '\r', '\n', '\r', '\n', 0);
}

/* Reads at most n of the first bytes of a write, out of two segments. Returns their number. */
INLINE u32 first_bytes(struct scratch *s, const struct segments *g, u32 n)
{
	u32 first = g->first_bytes < n ? g->first_bytes : n, second = n - first;

	__builtin_memset(s->header, 0, FEW_BYTES);
	if (bpf_probe_read_user(s->header, MASK(first, 2 * HEADER_BYTES - 1), (void *)g->first))
		return 0;
	if (second > g->second_bytes)
		second = g->second_bytes;
	if (!second || bpf_probe_read_user(&s->header[MASK(first, HEADER_BYTES - 1)], MASK(second, HEADER_BYTES - 1),
					   (void *)g->second))
		return first;
	return first + second;
}

#define ID_NAME WORD('"', 'i', 'd', '"', ':', 0, 0, 0)
#define ID_BYTES 128 /* of a body: an id is at its begin, with at most a chunk's size and "data: " before it */
#define MAX_ID_AT 32

struct id_search {
	struct scratch *s;
	u64 hash;
	u32 at;
};

static long find_id(u32 at, struct id_search *f)
{
	if ((word_at(f->s, at) & 0xffffffffff) != ID_NAME)
		return 0;
	f->at = at + 5;
	return 1;
}

static long hash_id(u32 i, struct id_search *f)
{
	u8 byte = f->s->header[MASK(f->at + i, ID_BYTES - 1)];

	if (byte == '"') {
		f->at = 0; /* the end */
		return 1;
	}
	f->hash = (f->hash ^ byte) * 1099511628211ULL;
	return 0;
}

/* The hash of the id at the begin of a response's body; 0 without one. Replaces the bytes in the scratch area. */
INLINE u64 id_hash(struct scratch *s, const struct segments *g)
{
	struct id_search f = { .s = s, .hash = 14695981039346656037ULL };

	__builtin_memset(s->header, 0, ID_BYTES);
	if (!first_bytes(s, g, ID_BYTES))
		return 0;
	bpf_loop(MAX_ID_AT, find_id, &f, 0);
	if (!f.at)
		return 0;
	if (s->header[MASK(f.at, ID_BYTES - 1)] == ' ')
		f.at++;
	if (s->header[MASK(f.at, ID_BYTES - 1)] != '"')
		return 0;
	f.at++;
	bpf_loop(ID_BYTES - MAX_ID_AT - 8, hash_id, &f, 0);
	return f.at ? 0 : f.hash;
}

/* Reads the first and last bytes of a write. */
INLINE void examine_write(struct connection *c, struct scratch *s, u64 n)
{
	struct segments g;
	struct parse p;
	u32 some;

	c->send_ns = bpf_ktime_get_ns();
	c->send_kind = SEND_BODY;
	if (!segments_of(n, &g))
		return;
	if (c->has_header && g.first_bytes >= FEW_BYTES)
		some = bpf_probe_read_user(s->header, FEW_BYTES, (void *)g.first) ? 0 : FEW_BYTES;
	else
		some = first_bytes(s, &g, c->has_header ? FEW_BYTES : HEADER_BYTES);
	if (!some)
		return;
	if (!c->has_header && word_at(s, 0) << 8 == WORD(0, 'H', 'T', 'T', 'P', '/', '1', '.')) {
		parse_header(&p, s, some);
		c->send_kind = SEND_HEADER;
		c->send_status = (s->header[9] - '0') * 100 + (s->header[10] - '0') * 10 + (s->header[11] - '0');
		c->send_header_bytes = p.header_bytes ? p.header_bytes : some;
		c->send_length = p.length;
		c->send_is_chunked = p.is_chunked;
	} else if (is_frame(s, n)) {
		c->send_kind = SEND_FRAME;
	}
	if ((c->is_chunked || c->send_kind == SEND_HEADER) && is_last_chunk(&g))
		c->send_kind |= SEND_LAST;
	if (c->send_kind == SEND_BODY && !c->request.first_ns)
		c->request.id_hash = id_hash(s, &g);
}

INLINE void token(struct connection *c, s64 now)
{
	struct request_event *r = &c->request;

	r->flags |= REQUEST_STREAMS;
	if (!r->n_tokens++)
		r->first_ns = now;
	else
		gap(r, now);
}

/* n bytes of a response's body were sent. */
INLINE void body(struct connection *c, u64 n, u8 kind)
{
	struct request_event *r = &c->request;

	if (c->answer_left > 0) {
		if (!r->first_ns)
			r->first_ns = c->send_ns;
		r->last_ns = c->send_ns;
		c->answer_left = c->answer_left > (s64)n ? c->answer_left - n : 0;
	} else if (c->answer_left < 0 && kind != SEND_FRAME && n) {
		token(c, c->send_ns);
		r->last_ns = c->send_ns;
	}
}

INLINE void header(struct connection *c, u64 n)
{
	struct request_event *r = &c->request;

	if (c->send_status < 200) /* 100 Continue */
		return;
	r->answer_ns = c->send_ns;
	r->flags &= ~REQUEST_UNANSWERED;
	r->status = c->send_status;
	c->has_header = 1;
	c->is_chunked = c->send_is_chunked;
	c->answer_left = c->send_is_chunked ? -1 : c->send_length;
	if (c->send_status == 204 || c->send_status == 304 || r->method[0] == 'H')
		c->answer_left = 0;
	r->last_ns = c->send_ns;
	if (n > c->send_header_bytes && !(c->send_kind & SEND_LAST && n == c->send_header_bytes + 5))
		body(c, n - c->send_header_bytes, SEND_BODY);
}

/* Bytes that wait in a TCP socket, and its limit. A client that takes no data leaves a socket full: a server that polls
 * until it can write never gets an error. */
INLINE bool is_filled(struct sock *sk)
{
	int queued, limit;

	if (BPF_CORE_READ(sk, __sk_common.skc_family) == AF_UNIX)
		return false;
	queued = BPF_CORE_READ(sk, sk_wmem_queued);
	limit = BPF_CORE_READ(sk, sk_sndbuf);
	return limit - queued < queued >> 1; /* as sk_stream_is_writeable() */
}

/* A client that takes the data has emptied the socket by the next write. */
INLINE bool is_still_filled(struct sock *sk)
{
	return BPF_CORE_READ(sk, sk_wmem_queued) > BPF_CORE_READ(sk, sk_sndbuf) >> 2;
}

INLINE int has_sent(struct sock *sk, long n)
{
	struct connection *c;
	struct http2 *h;
	struct scratch *s;
	u64 key = (u64)sk;
	u8 kind;

	if (!is_engine())
		return 0;
	c = bpf_map_lookup_elem(&connections, &key);
	if (!c) {
		h = bpf_map_lookup_elem(&http2s, &key);
		if (h)
			http2_sent(h, key, n);
		return 0;
	}
	if (!c->request.ts_ns || !(s = scratch()))
		return 0;
	if (n <= 0) {
		if (n == -EAGAIN) {
			c->is_filled = 0;
			if (!c->full_since_ns)
				c->full_since_ns = bpf_ktime_get_ns();
		}
		return 0;
	}
	examine_write(c, s, n);
	if (c->request.writer_tid != (u32)bpf_get_current_pid_tgid() || c->send_ns - c->request.last_ns > FOLLOW_AFTER_NS)
		follow_thread();
	if (c->full_since_ns && (!c->is_filled || is_still_filled(sk)))
		c->request.blocked_ns += c->send_ns - c->full_since_ns;
	c->is_filled = is_filled(sk);
	c->full_since_ns = c->is_filled ? c->send_ns : 0;
	kind = c->send_kind & ~SEND_LAST;
	c->request.response_bytes += n;
	c->request.writer_tid = bpf_get_current_pid_tgid();
	if (kind == SEND_HEADER)
		header(c, n);
	else if (c->has_header)
		body(c, n, c->send_kind & SEND_LAST && n <= 5 ? SEND_FRAME : kind);
	if (c->has_header && (c->answer_left == 0 || c->send_kind & SEND_LAST))
		end_request(c, c->send_ns, 0);
	return 0;
}

/* ---- sockets ---- */

SEC("?tp_btf/sock_recv_length")
int BPF_PROG(serving_read, struct sock *sk, int result, int flags)
{
	return has_read(sk, result, flags);
}

SEC("?tp_btf/sock_send_length")
int BPF_PROG(serving_sent, struct sock *sk, int result)
{
	return has_sent(sk, result);
}

/* Both ends of a connection come here: the closing process, and the kernel when the peer has reset it. */
SEC("?tp_btf/inet_sock_set_state")
int BPF_PROG(serving_state, struct sock *sk, int before, int after)
{
	u64 key = (u64)sk;

	/* The kernel reuses the addresses of sockets, and the end of a connection arrives as data, too. */
	if (after == TCP_ESTABLISHED || after == TCP_CLOSE)
		bpf_map_delete_elem(&early_arrivals, &key);
	if (after == TCP_FIN_WAIT1 || after == TCP_LAST_ACK || after == TCP_CLOSE) {
		http2_closed(key);
		return has_closed(sk);
	}
	return 0;
}

/* Data has reached a socket; this may run in an interrupt. */
SEC("?tp_btf/sk_data_ready")
int BPF_PROG(serving_arrival, struct sock *sk)
{
	struct connection *c;
	struct http2 *h;
	u64 key = (u64)sk;
	u16 port;
	s64 now;

	port = sk->__sk_common.skc_num; /* 0: a Unix socket */
	if (port && !is_serving_port(port))
		return 0;
	c = bpf_map_lookup_elem(&connections, &key);
	if (c) {
		if (!c->arrived_ns)
			c->arrived_ns = bpf_ktime_get_ns();
		return 0;
	}
	now = bpf_ktime_get_ns();
	h = bpf_map_lookup_elem(&http2s, &key);
	if (h && !h->arrived_ns)
		h->arrived_ns = now;
	if (h || !port)
		return 0;
	bpf_map_update_elem(&early_arrivals, &key, &now, BPF_NOEXIST);
	return 0;
}
