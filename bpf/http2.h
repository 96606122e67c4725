/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Requests over gRPC: the frames of HTTP/2 (RFC 9113), and the messages in them. A part of serving.bpf.c.
 *
 * A request begins with the frame of its header fields. A message that the server sends is a token. The request ends
 * with the last frame of its stream. If a client sends further messages on a stream after the server has answered, as
 * on Triton's ModelStreamInfer, each of them begins a request.
 *
 * The programs read the headers of frames, the prefix of each message and the names and lengths of header fields. Of
 * their values they read only the path and gRPC's status, and of requests to Triton the name of the model. Bytes are
 * read where a frame, field or message continues in another call. */
#ifndef STALLSCOPE_HTTP2_H
#define STALLSCOPE_HTTP2_H

#define N_HTTP2 4096
#define N_STREAMS 16384
#define N_HTTP2_VALUES 16384
#define PREFACE_BYTES 24
#define INITIAL_WINDOW 65535
#define MAX_FRAME_TYPE 0x10
#define MAX_STEPS (1 << 15)
#define FIELD_BYTES 2048 /* header fields that are read at once, a power of two */
#define UNKNOWN_INSERTED (1 << 24) /* insertions before the trace: more than any index goes back */

enum frame_type {
	FRAME_DATA,
	FRAME_HEADERS,
	FRAME_RESET = 3,
	FRAME_SETTINGS = 4,
	FRAME_PING = 6,
	FRAME_WINDOW = 8,
	FRAME_CONTINUATION = 9,
	FRAME_PREFACE = 0xff, /* not a frame: the first bytes of a connection */
};

enum frame_flag {
	FRAME_END_STREAM = 1,
	FRAME_ACK = 1,
	FRAME_END_HEADERS = 4,
	FRAME_PADDED = 8,
	FRAME_PRIORITY = 0x20,
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_HTTP2);
	__type(key, u64); /* address of the socket */
	__type(value, struct http2);
} http2s SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_STREAMS);
	__type(key, struct stream_key);
	__type(value, struct stream);
} streams SEC(".maps");

struct known_value {
	char text[N_PATH];
	u32 hash;
	u8 huffman_bytes;
	u8 spare[3];
};

/* The values in the dynamic tables of HPACK: in `stream`, the key has the number of the insertion. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_HTTP2_VALUES);
	__type(key, struct stream_key);
	__type(value, struct known_value);
} http2_values SEC(".maps");

struct frame_walk {
	struct http2 *h;
	struct frames *f;
	struct scratch *s;
	u64 iov;
	u64 n_iov; /* further parts */
	u64 at;
	u32 part; /* bytes of this part */
	u32 n;	  /* bytes of the call */
	s64 ts_ns;
	s64 now;
	u32 is_out;
	u32 is_broken;
};

/* ---- header fields ---- */

enum field_state {
	FIELD_BEGIN,
	FIELD_NUMBER, /* an index that continues; is followed by a name, a value or the next field */
	FIELD_NAME_LENGTH,
	FIELD_NAME_LENGTH_MORE,
	FIELD_NAME,
	FIELD_VALUE_LENGTH,
	FIELD_VALUE_LENGTH_MORE,
	FIELD_VALUE,
};

enum field_kind {
	FIELD_INDEXED,
	FIELD_LITERAL,
	FIELD_SIZE, /* of the dynamic table */
};

#define N_STATIC 61
#define INDEX_PATH 4
#define INDEX_INDEX_HTML 5
#define PATH_NAME 0x3a70617468ULL /* :path */
#define STATUS_NAME 0x632d737461747573ULL /* the last 8 letters of grpc-status */
#define STATUS_CODED 0x9acac8b21234da8fULL /* grpc-status in the code of HTTP/2's header fields */
#define PATH_NAME_BYTES 5
#define STATUS_NAME_BYTES 11
#define STATUS_CODED_BYTES 8
#define OK_TEXT '0'
#define OK_CODED 7

struct field_walk {
	struct http2 *h;
	struct fields *f;
	struct scratch *s;
	u32 at;
	u32 n;
};

INLINE struct known_value *known_value(const struct http2 *h, const struct fields *f)
{
	struct stream_key key = {
		.connection = h->id,
		.stream = f->n_inserted + N_STATIC - f->number,
		.is_out = f->is_out,
	};

	return f->number > N_STATIC ? bpf_map_lookup_elem(&http2_values, &key) : NULL;
}

INLINE void use_value(struct fields *f, const struct known_value *known)
{
	__builtin_memcpy(f->value, known->text, sizeof(f->value));
	f->value_hash = known->hash;
	f->huffman_bytes = known->huffman_bytes;
}

INLINE void field_ends(const struct http2 *h, struct fields *f)
{
	struct stream_key key = { .connection = h->id, .stream = f->n_inserted, .is_out = f->is_out };
	struct known_value known = {};

	f->state = FIELD_BEGIN;
	if (f->is_wanted) {
		f->huffman_bytes = f->is_huffman ? f->value_bytes : 0;
		if (f->is_inserted) {
			__builtin_memcpy(known.text, f->value, sizeof(known.text));
			known.hash = f->value_hash;
			known.huffman_bytes = f->huffman_bytes;
			bpf_map_update_elem(&http2_values, &key, &known, BPF_ANY);
		}
	}
	if (f->is_inserted)
		f->n_inserted++;
}

/* The index of a field or of its name is known. */
INLINE void index_ends(const struct http2 *h, struct fields *f)
{
	struct known_value *known = known_value(h, f);

	f->is_wanted = known || (!f->is_out && (f->number == INDEX_PATH || f->number == INDEX_INDEX_HTML));
	if (f->kind == FIELD_INDEXED) {
		if (known)
			use_value(f, known);
		f->state = FIELD_BEGIN;
	} else if (f->kind == FIELD_SIZE) {
		f->state = FIELD_BEGIN;
	} else {
		f->state = f->number ? FIELD_VALUE_LENGTH : FIELD_NAME_LENGTH;
	}
}

INLINE void text_begins(const struct http2 *h, struct fields *f, bool is_value)
{
	f->text_left = f->number;
	if (!is_value) {
		f->state = f->text_left ? FIELD_NAME : FIELD_VALUE_LENGTH;
		f->name_bytes = f->text_left <= STATUS_NAME_BYTES ? f->text_left : 0;
		f->name = 0;
		return;
	}
	f->state = FIELD_VALUE;
	if (f->is_wanted) {
		__builtin_memset(f->value, 0, sizeof(f->value));
		f->value_hash = 2166136261u;
		f->value_bytes = 0;
	}
	if (!f->text_left)
		field_ends(h, f);
}

/* The name of a field is complete: is it the path of a request, or the status of a response? */
INLINE bool is_wanted_name(const struct fields *f)
{
	if (!f->is_out)
		return !f->is_huffman && f->name_bytes == PATH_NAME_BYTES && f->name == PATH_NAME;
	if (f->is_huffman)
		return f->name_bytes == STATUS_CODED_BYTES && f->name == STATUS_CODED;
	return f->name_bytes == STATUS_NAME_BYTES && f->name == STATUS_NAME;
}

/* The first byte of a field. */
INLINE void field_begins(const struct http2 *h, struct fields *f, u8 byte)
{
	u8 mask;

	f->is_wanted = f->is_inserted = f->is_huffman = 0;
	f->shift = 0;
	if (byte & 0x80) {
		f->kind = FIELD_INDEXED;
		mask = 0x7f;
	} else if (byte & 0x40) {
		f->kind = FIELD_LITERAL;
		f->is_inserted = 1;
		mask = 0x3f;
	} else if (byte & 0x20) {
		f->kind = FIELD_SIZE;
		mask = 0x1f;
	} else {
		f->kind = FIELD_LITERAL;
		mask = 0x0f;
	}
	f->number = byte & mask;
	if (f->number == mask)
		f->state = FIELD_NUMBER;
	else
		index_ends(h, f);
}

/* A byte of a number that continues. True: it was the last one. */
INLINE bool number_continues(struct fields *f, u8 byte)
{
	f->number += (u32)(byte & 0x7f) << (f->shift & 31);
	f->shift += 7;
	return !(byte & 0x80);
}

INLINE void length_begins(const struct http2 *h, struct fields *f, u8 byte, bool is_value)
{
	f->is_huffman = byte >> 7;
	f->number = byte & 0x7f;
	f->shift = 0;
	if (f->number == 0x7f)
		f->state = is_value ? FIELD_VALUE_LENGTH_MORE : FIELD_NAME_LENGTH_MORE;
	else
		text_begins(h, f, is_value);
}

INLINE void value_byte(struct fields *f, u8 byte)
{
	if (f->value_bytes >= N_PATH - 1 || (byte == '?' && !f->is_huffman))
		return;
	f->value[MASK(f->value_bytes, N_PATH - 1)] = byte;
	f->value_bytes++;
	f->value_hash = (f->value_hash ^ byte) * 16777619u;
}

static long walk_field(u32 number, struct field_walk *w)
{
	const struct http2 *h = w->h;
	struct fields *f = w->f;
	u32 left, n;
	u8 byte;

	if (w->at >= w->n)
		return 1;
	left = w->n - w->at;
	if ((f->state == FIELD_NAME && !f->name_bytes) || (f->state == FIELD_VALUE && !f->is_wanted)) {
		n = f->text_left < left ? f->text_left : left;
		w->at += n;
		f->text_left -= n;
		if (f->text_left)
			return 0;
		if (f->state == FIELD_NAME)
			f->state = FIELD_VALUE_LENGTH;
		else
			field_ends(h, f);
		return 0;
	}
	byte = w->s->header[MASK(w->at, FIELD_BYTES - 1)];
	w->at++;
	switch (f->state) {
	case FIELD_BEGIN:
		field_begins(h, f, byte);
		break;
	case FIELD_NUMBER:
		if (number_continues(f, byte))
			index_ends(h, f);
		break;
	case FIELD_NAME_LENGTH:
		length_begins(h, f, byte, false);
		break;
	case FIELD_NAME_LENGTH_MORE:
		if (number_continues(f, byte))
			text_begins(h, f, false);
		break;
	case FIELD_NAME:
		f->name = f->name << 8 | byte;
		if (!--f->text_left) {
			f->is_wanted = is_wanted_name(f);
			f->state = FIELD_VALUE_LENGTH;
		}
		break;
	case FIELD_VALUE_LENGTH:
		length_begins(h, f, byte, true);
		break;
	case FIELD_VALUE_LENGTH_MORE:
		if (number_continues(f, byte))
			text_begins(h, f, true);
		break;
	case FIELD_VALUE:
		value_byte(f, byte);
		if (!--f->text_left)
			field_ends(h, f);
		break;
	}
	return 0;
}

INLINE struct fields *fields_of(const struct frame_walk *w)
{
	return w->is_out ? &w->h->out_fields : &w->h->in_fields;
}

/* The fields of a request or a response begin. */
INLINE void fields_begin(const struct frame_walk *w)
{
	struct fields *f = fields_of(w);

	f->state = FIELD_BEGIN;
	f->value_hash = f->huffman_bytes = 0;
	__builtin_memset(f->value, 0, sizeof(f->value));
}

/* Reads n bytes of header fields. */
INLINE void walk_fields(struct frame_walk *w, u32 n)
{
	struct field_walk fields = { .h = w->h, .f = fields_of(w), .s = w->s, .n = n };

	if (!bpf_probe_read_user(w->s->header, MASK(n, 2 * FIELD_BYTES - 1), (void *)w->at))
		bpf_loop(FIELD_BYTES, walk_field, &fields, 0);
}

/* ---- streams ---- */

INLINE struct stream *stream_of(const struct frame_walk *w)
{
	struct stream_key key = { .connection = w->h->id, .stream = w->f->stream };

	return bpf_map_lookup_elem(&streams, &key);
}

INLINE void begin_request(struct request_event *r, const struct frame_walk *w)
{
	u64 id = bpf_get_current_pid_tgid();

	r->ts_ns = w->ts_ns;
	r->read_ns = w->now;
	r->complete_ns = r->answer_ns = r->first_ns = r->last_ns = r->end_ns = 0;
	r->gap_ns = r->gap_at_ns = r->blocked_ns = 0;
	r->request_bytes = r->response_bytes = 0;
	r->id = w->now ^ id << 20 ^ (u64)w->f->stream << 40;
	r->pid = id >> 32;
	r->tid = id;
	r->writer_tid = r->n_tokens = 0;
	r->client = w->h->client;
	r->status = 0;
	r->flags = REQUEST_UNANSWERED;
}

/* The fields of a request are complete. Fields of an open stream are trailers. */
INLINE void fields_end(struct frame_walk *w)
{
	struct stream_key key = { .connection = w->h->id, .stream = w->f->stream };
	struct stream *st = bpf_map_lookup_elem(&streams, &key), *fresh = &w->s->fresh_stream;
	struct fields *f = &w->h->in_fields;

	f->state = FIELD_BEGIN;
	if (!st) {
		__builtin_memset(fresh, 0, sizeof(*fresh));
		begin_request(&fresh->request, w);
		__builtin_memcpy(fresh->request.method, "POST", 4);
		__builtin_memcpy(fresh->request.path, f->value, sizeof(f->value));
		fresh->request.path_hash = f->value_hash;
		fresh->request.huffman_bytes = f->huffman_bytes;
		fresh->blocked_before_ns = w->h->blocked_ns;
		bpf_map_update_elem(&streams, &key, fresh, BPF_NOEXIST);
		w->h->n_open++;
		st = bpf_map_lookup_elem(&streams, &key);
		if (!st)
			return;
	}
	if (w->h->ends_stream) {
		st->is_half_closed = 1;
		st->request.complete_ns = w->now;
	}
}

INLINE void add_blocked(struct stream *st, const struct http2 *h, s64 now)
{
	struct request_event *r = &st->request;
	s64 opened_ns = h->opened_ns > st->opened_ns ? h->opened_ns : st->opened_ns;

	if (st->stalled_ns)
		r->blocked_ns += (opened_ns > st->stalled_ns ? opened_ns : now) - st->stalled_ns;
	st->stalled_ns = 0;
}

/* now: the end of the response. A response on a stream that is still open for requests ended with its last message. */
INLINE void report_stream(struct stream *st, struct http2 *h, s64 now, u8 flags)
{
	struct request_event *r = &st->request;
	bool has_ended = st->is_half_closed || !st->n_messages || flags;

	if (!r->ts_ns)
		return;
	add_blocked(st, h, now);
	r->blocked_ns += h->blocked_ns - st->blocked_before_ns;
	if (h->full_since_ns)
		r->blocked_ns += now - h->full_since_ns;
	r->end_ns = has_ended ? now : r->last_ns;
	r->flags |= flags;
	report_request(r);
}

INLINE void end_stream(struct frame_walk *w, u8 flags)
{
	struct stream_key key = { .connection = w->h->id, .stream = w->f->stream };
	struct stream *st = bpf_map_lookup_elem(&streams, &key);

	if (!st)
		return;
	report_stream(st, w->h, w->now, flags);
	bpf_map_delete_elem(&streams, &key);
	w->h->n_open--;
}

/* ---- messages ---- */

INLINE void message_sent(struct frame_walk *w, struct stream *st)
{
	struct request_event *r = &st->request;

	if (!st->n_messages++) {
		r->first_ns = w->now;
	} else {
		r->flags |= REQUEST_STREAMS;
		r->n_tokens = st->n_messages;
		gap(r, w->now);
	}
	r->last_ns = w->now;
}

INLINE void message_received(struct frame_walk *w, struct stream *st)
{
	struct request_event *r = &st->request;

	if (st->n_messages) { /* the next request on the stream */
		report_stream(st, w->h, w->now, 0);
		begin_request(r, w);
		st->n_messages = 0;
		st->blocked_before_ns = w->h->blocked_ns;
	}
	r->complete_ns = w->now;
}

/* FNV-1a hashes of the paths of Triton's gRPC calls: as text, and in the code of HTTP/2's header fields. */
#define TRITON_INFER 0xdce5c95b	       /* /inference.GRPCInferenceService/ModelInfer */
#define TRITON_INFER_CODED 0x9e63c299
#define TRITON_STREAM 0xe41ccbe3       /* /inference.GRPCInferenceService/ModelStreamInfer */
#define TRITON_STREAM_CODED 0xe6dd9b32

INLINE bool is_triton_stream(u32 hash)
{
	return hash == TRITON_STREAM || hash == TRITON_STREAM_CODED;
}

INLINE bool is_triton_path(u32 hash)
{
	return hash == TRITON_INFER || hash == TRITON_INFER_CODED || is_triton_stream(hash);
}

/* The name of the model: the first field of a request to Triton (ModelInferRequest in grpc_service.proto). n: bytes of
 * the message at hand. Only these calls are read: the first field of other calls may be contents. */
INLINE void model_of_message(struct frame_walk *w, struct stream *st, u32 n)
{
	struct request_event *r = &st->request;
	u8 head[2] = {};
	u32 some;

	if (r->model[0] || !is_triton_path(r->path_hash) || n < sizeof(head))
		return;
	if (bpf_probe_read_user(head, sizeof(head), (void *)w->at) || head[0] != 0x0a)
		return;
	some = head[1];
	if (some >= N_MODEL || n - sizeof(head) < some) /* a longer name stays unknown */
		return;
	bpf_probe_read_user(r->model, some, (void *)(w->at + sizeof(head)));
}

/* A part of a message: returns the number of bytes that were used, of n. */
INLINE u32 message_part(struct frame_walk *w, struct stream *st, struct message *m, u32 n)
{
	u32 some;

	if (m->left) {
		if (!w->is_out && !m->is_begun)
			model_of_message(w, st, m->left < n ? m->left : n);
		m->is_begun = 1;
		some = m->left < n ? m->left : n;
		m->left -= some;
	} else {
		some = N_PREFIX - m->n_prefix;
		some = some < n ? some : n;
		bpf_probe_read_user(&m->prefix[m->n_prefix & 7], some & 7, (void *)w->at);
		m->n_prefix += some;
		if (m->prefix[0] > 1) {
			st->is_plain = 1;
			if (w->is_out)
				message_sent(w, st);
			return n;
		}
		if (m->n_prefix < N_PREFIX)
			return some;
		m->n_prefix = m->is_begun = 0;
		m->left = (u32)m->prefix[1] << 24 | m->prefix[2] << 16 | m->prefix[3] << 8 | m->prefix[4];
	}
	if (!m->left) {
		if (w->is_out)
			message_sent(w, st);
		else
			message_received(w, st);
	}
	return some;
}

/* A part of a data frame: returns the number of bytes that were used, of n. */
INLINE u32 data_part(struct frame_walk *w, u32 n)
{
	struct stream *st = stream_of(w);

	if (!st || st->is_plain)
		return n;
	return w->is_out ? message_part(w, st, &st->out, n) : message_part(w, st, &st->in, n);
}

/* ---- frames ---- */

INLINE void data_frame(struct frame_walk *w)
{
	struct frames *f = w->f;
	struct stream *st = stream_of(w);
	struct http2 *h = w->h;

	if (!st)
		return;
	if (!w->is_out) {
		st->request.request_bytes += f->left;
		return;
	}
	st->request.response_bytes += f->left;
	st->request.writer_tid = bpf_get_current_pid_tgid();
	add_blocked(st, h, w->now);
	h->window -= f->left;
	st->credit -= f->left;
	if (h->knows_windows && (h->window <= 0 || h->stream_window + st->credit <= 0))
		st->stalled_ns = w->now;
	if (st->is_plain)
		message_sent(w, st);
}

INLINE void answered(struct frame_walk *w)
{
	struct stream *st = stream_of(w);

	if (!st)
		return;
	if (!st->request.answer_ns)
		st->request.answer_ns = w->now;
	if (st->n_headers < 2)
		st->n_headers++;
	st->request.flags &= ~REQUEST_UNANSWERED;
	st->request.response_bytes += w->f->left;
	st->request.writer_tid = bpf_get_current_pid_tgid();
	st->request.status = 200;
}

INLINE void frame_begins(struct frame_walk *w)
{
	struct frames *f = w->f;
	u8 *h = f->header;

	f->left = (u32)h[0] << 16 | (u32)h[1] << 8 | h[2];
	f->type = h[3];
	f->flags = h[4];
	f->stream = (u32)(h[5] & 0x7f) << 24 | (u32)h[6] << 16 | (u32)h[7] << 8 | h[8];
	f->padding = f->skip = f->needs_padding = f->n_value = 0;
	f->value = 0;
	if (f->type > MAX_FRAME_TYPE) {
		w->is_broken = 1;
		return;
	}
	if (f->type == FRAME_DATA || f->type == FRAME_HEADERS)
		f->needs_padding = !!(f->flags & FRAME_PADDED);
	if (f->type == FRAME_DATA) {
		data_frame(w);
	} else if (f->type == FRAME_HEADERS) {
		if (f->flags & FRAME_PRIORITY)
			f->skip = 5;
		fields_begin(w);
		if (w->is_out)
			answered(w);
		else
			w->h->ends_stream = f->flags & FRAME_END_STREAM;
	}
}

INLINE void window_grows(struct frame_walk *w)
{
	struct frames *f = w->f;
	struct http2 *h = w->h;
	struct stream *st;

	if (!f->stream) {
		if (h->window <= 0 && h->window + (s64)f->value > 0)
			h->opened_ns = w->now;
		h->window += f->value;
		return;
	}
	st = stream_of(w);
	if (!st)
		return;
	if (h->stream_window + st->credit <= 0 && h->stream_window + st->credit + (s64)f->value > 0)
		st->opened_ns = w->now;
	st->credit += f->value;
}

/* A call has failed by its status, which is in the last fields of the response. On a connection from before the trace,
 * the status may be unknown: then a response that is its end alone has failed, except on Triton's stream, whose errors
 * are messages. */
INLINE bool has_failed(const struct frame_walk *w)
{
	const struct fields *f = &w->h->out_fields;
	struct stream *st = stream_of(w);

	if (f->value[0])
		return f->value[0] != (f->huffman_bytes ? OK_CODED : OK_TEXT) || f->value[1];
	return st && !st->n_messages && !st->is_plain && !st->out.left && st->n_headers == 1 &&
	       !is_triton_stream(st->request.path_hash);
}

INLINE void frame_ends(struct frame_walk *w)
{
	struct frames *f = w->f;
	struct stream *st;

	f->n_header = 0;
	switch (f->type) {
	case FRAME_DATA:
		if (!(f->flags & FRAME_END_STREAM))
			return;
		if (w->is_out) {
			end_stream(w, 0);
		} else if ((st = stream_of(w))) {
			st->is_half_closed = 1;
			if (!st->request.complete_ns)
				st->request.complete_ns = w->now;
		}
		return;
	case FRAME_HEADERS:
	case FRAME_CONTINUATION:
		if (w->is_out) {
			if (f->type == FRAME_HEADERS)
				f->ends_stream = f->flags & FRAME_END_STREAM;
			if (f->ends_stream && f->flags & FRAME_END_HEADERS)
				end_stream(w, has_failed(w) ? REQUEST_FAILED : 0);
		} else if (f->flags & FRAME_END_HEADERS) {
			fields_end(w);
		}
		return;
	case FRAME_RESET:
		end_stream(w, w->is_out ? REQUEST_ABORTED : REQUEST_ABORTED | REQUEST_CLIENT_LEFT);
		return;
	case FRAME_WINDOW:
		if (!w->is_out)
			window_grows(w);
		return;
	}
}

/* A byte of a number in a frame: the growth of a window, or a setting. */
INLINE void number_byte(struct frame_walk *w, u8 byte)
{
	struct frames *f = w->f;

	f->value = f->value << 8 | byte;
	if (f->type != FRAME_SETTINGS || ++f->n_value < 6)
		return;
	f->n_value = 0;
	if ((f->value >> 32 & 0xffff) == 4) /* SETTINGS_INITIAL_WINDOW_SIZE */
		w->h->stream_window = f->value & 0xffffffff;
	f->value = 0;
}

/* A part of the payload of a frame: returns the number of bytes that were used, of n. */
INLINE u32 payload_part(struct frame_walk *w, u32 n)
{
	struct frames *f = w->f;
	u32 body = f->left > f->padding ? f->left - f->padding : 0;
	u8 byte = 0;

	if (f->needs_padding) {
		bpf_probe_read_user(&byte, 1, (void *)w->at);
		f->padding = byte;
		f->needs_padding = 0;
		return 1;
	}
	if (!body)
		return n;
	n = body < n ? body : n;
	if (f->skip) {
		n = f->skip < n ? f->skip : n;
		f->skip -= n;
		return n;
	}
	if (f->type == FRAME_DATA)
		return data_part(w, n);
	if (!w->is_out && (f->type == FRAME_WINDOW || (f->type == FRAME_SETTINGS && !(f->flags & FRAME_ACK)))) {
		bpf_probe_read_user(&byte, 1, (void *)w->at);
		number_byte(w, byte);
		return 1;
	}
	if (f->type == FRAME_HEADERS || f->type == FRAME_CONTINUATION) {
		n = n < FIELD_BYTES ? n : FIELD_BYTES;
		walk_fields(w, n);
	}
	return n;
}

INLINE u32 header_part(struct frame_walk *w, u32 n)
{
	struct frames *f = w->f;
	u32 some = N_FRAME_HEADER - f->n_header;

	some = some < n ? some : n;
	bpf_probe_read_user(&f->header[MASK(f->n_header, 15)], MASK(some, 15), (void *)w->at);
	f->n_header += some;
	if (f->n_header < N_FRAME_HEADER)
		return some;
	frame_begins(w);
	if (!f->left)
		frame_ends(w);
	return some;
}

static long walk_bytes(u32 number, struct frame_walk *w)
{
	struct frames *f = w->f;
	struct user_iovec part;
	u32 n;

	if (!w->n || w->is_broken)
		return 1;
	if (!w->part) {
		if (!w->n_iov || bpf_probe_read_user(&part, sizeof(part), (void *)w->iov))
			return 1;
		w->iov += sizeof(part);
		w->n_iov--;
		w->at = part.base;
		w->part = part.n_bytes < w->n ? part.n_bytes : w->n;
		return 0;
	}
	if (f->n_header < N_FRAME_HEADER) {
		n = header_part(w, w->part);
	} else {
		n = payload_part(w, f->left < w->part ? f->left : w->part);
		f->left -= n;
		if (!f->left)
			frame_ends(w);
	}
	w->at += n;
	w->part -= n;
	w->n -= n;
	return 0;
}

/* ---- connections ---- */

struct closing {
	struct http2 *h;
};

static long report_open(void *map, const struct stream_key *key, struct stream *st, struct closing *closing)
{
	struct http2 *h = closing->h;

	if (key->connection != h->id)
		return 0;
	report_stream(st, h, bpf_ktime_get_ns(), st->is_half_closed || !st->n_messages ? REQUEST_ABORTED : 0);
	bpf_map_delete_elem(&streams, key);
	return 0;
}

INLINE void http2_closed(u64 socket)
{
	struct closing closing = { .h = bpf_map_lookup_elem(&http2s, &socket) };

	if (!closing.h)
		return;
	if (closing.h->n_open)
		bpf_for_each_map_elem(&streams, report_open, &closing, 0);
	bpf_map_delete_elem(&http2s, &socket);
}

INLINE void walk_call(struct frame_walk *w)
{
	if (bpf_loop(MAX_STEPS, walk_bytes, w, 0) >= MAX_STEPS)
		w->is_broken = 1;
}

INLINE void http2_read(struct http2 *h, u64 socket, const struct segments *g, u32 n, s64 ts_ns, s64 now)
{
	struct frame_walk w = { .h = h, .f = &h->in, .s = scratch(), .iov = g->iov, .n_iov = g->n_iov, .n = n, .now = now };

	if (!w.s)
		return;
	w.ts_ns = ts_ns;
	if (!g->iov) {
		w.at = g->first;
		w.part = n;
	}
	walk_call(&w);
	if (w.is_broken)
		http2_closed(socket);
}

INLINE void http2_sent(struct http2 *h, u64 socket, long n)
{
	struct frame_walk w = { .h = h, .f = &h->out, .s = scratch(), .n = n, .is_out = 1 };
	struct segments g;

	w.now = bpf_ktime_get_ns();
	if (n <= 0) {
		if (n == -EAGAIN && !h->full_since_ns)
			h->full_since_ns = w.now;
		return;
	}
	if (h->full_since_ns) {
		h->blocked_ns += w.now - h->full_since_ns;
		h->full_since_ns = 0;
	}
	if (!w.s || !segments_of(n, &g))
		return;
	w.iov = g.iov;
	w.n_iov = g.n_iov;
	if (!g.iov) {
		w.at = g.first;
		w.part = n;
	}
	follow_thread();
	walk_call(&w);
	if (w.is_broken)
		http2_closed(socket);
}

/* Whether a frame of n bytes has fields of a request, or is a small frame that may be sent before it. */
INLINE bool is_frame_of_client(const u8 *header, u32 n)
{
	u8 flags = header[4], stream = header[8];

	switch (header[3]) {
	case FRAME_HEADERS:
		return n >= 4 && n <= FIELD_BYTES && flags & FRAME_END_HEADERS && stream & 1 &&
		       !(flags & ~(FRAME_END_HEADERS | FRAME_END_STREAM | FRAME_PRIORITY));
	case FRAME_WINDOW:
	case FRAME_RESET:
		return n == 4 && !flags;
	case FRAME_PING:
		return n == 8 && !(flags & ~FRAME_ACK) && !stream;
	case FRAME_SETTINGS:
		return !n && flags == FRAME_ACK && !stream;
	}
	return false;
}

/* Whether the first bytes of a read are the begin of a connection, or of a frame on a connection from before the
 * trace. */
INLINE bool is_http2(const struct scratch *s)
{
	const u8 *h = s->header;

	if (word_at(s, 0) == WORD('P', 'R', 'I', ' ', '*', ' ', 'H', 'T') &&
	    word_at(s, 8) == WORD('T', 'P', '/', '2', '.', '0', '\r', '\n'))
		return true;
	return !h[5] && is_frame_of_client(h, (u32)h[0] << 16 | (u32)h[1] << 8 | h[2]);
}

INLINE struct http2 *new_http2(struct sock *sk, struct scratch *s, s64 now)
{
	struct http2 *h = &s->fresh_http2;
	u64 socket = (u64)sk;

	__builtin_memset(h, 0, sizeof(*h));
	h->id = now;
	h->window = h->stream_window = INITIAL_WINDOW;
	h->out_fields.is_out = 1;
	h->client = client_of(sk);
	if (s->header[0] == 'P') {
		h->knows_windows = 1;
		h->in.n_header = N_FRAME_HEADER;
		h->in.type = FRAME_PREFACE;
		h->in.left = PREFACE_BYTES;
	} else {
		h->in_fields.n_inserted = h->out_fields.n_inserted = UNKNOWN_INSERTED;
	}
	bpf_map_update_elem(&http2s, &socket, h, BPF_NOEXIST);
	return bpf_map_lookup_elem(&http2s, &socket);
}

#endif
