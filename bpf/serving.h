/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Records of requests that a server answers over HTTP/1.1. Their only definition, as in events.h. */
#ifndef STALLSCOPE_SERVING_H
#define STALLSCOPE_SERVING_H

#include "events.h"

#define N_METHOD 8
#define N_PATH 64 /* a power of two */

enum request_flag {
	REQUEST_STREAMS = 1,	/* the response body came in parts: each part is a token */
	REQUEST_ABORTED = 2,	/* the connection was closed before the end of the response */
	REQUEST_PIPELINED = 4,	/* it arrived before the end of the response to the request before it */
	REQUEST_CLIENT_LEFT = 8, /* the client closed its side before the end of the response */
	REQUEST_UNANSWERED = 16, /* no byte of the response was sent */
};

struct request_event { /* times are 0 until they are known */
	s64 ts_ns;	    /* its first byte reached the socket */
	s64 read_ns;	    /* the process read its first byte */
	s64 complete_ns;    /* the process read its last byte */
	s64 answer_ns;	    /* first byte of the response */
	s64 first_ns;	    /* first byte of the response's body, or first token */
	s64 last_ns;	    /* last byte of the response so far, or last token */
	s64 end_ns;
	s64 gap_ns;	    /* the longest time between two tokens */
	s64 gap_at_ns;	    /* and its begin */
	s64 blocked_ns;	    /* writes that did not block found the socket full: the client did not take data */
	u64 request_bytes;
	u64 response_bytes;
	u64 id;
	u32 pid;
	u32 tid;	    /* the thread that read it */
	u32 writer_tid;	    /* the thread that wrote last */
	u32 n_tokens;
	u32 path_hash;
	u16 status;
	u8 flags;
	u8 spare;
	char method[N_METHOD];
	char path[N_PATH];
	u64 spare2[6];
};
_Static_assert(sizeof(struct request_event) == 248, "request_event: 256 with the ring's header");

struct token_event {
	s64 ts_ns;
	s64 gap_ns;	    /* since the token before it */
	u32 pid;
	u32 path_hash;
};
_Static_assert(sizeof(struct token_event) == 24, "token_event: 32 with the ring's header");

#define N_WAITING 4 /* pipelined requests of a connection */

struct waiting {
	s64 ts_ns;
	s64 read_ns;
	s64 complete_ns;
	u64 request_bytes;
	char method[N_METHOD];
	char path[N_PATH];
	u32 path_hash;
	u32 spare;
};

struct connection {
	struct request_event request; /* ts_ns 0: no request is open */
	s64 arrived_ns;	    /* data that the process has not read yet; 0 none */
	s64 body_left;	    /* bytes of the request's body that are still to come */
	s64 answer_left;    /* bytes of the response's body; -1: until a last chunk or the end of the connection */
	s64 full_since_ns;  /* the socket has been full since; 0: it is not */
	/* the last write */
	s64 send_ns;
	s64 send_length;    /* of the body by its header; -1 none */
	u32 send_header_bytes;
	u16 send_status;
	u8 send_kind;
	u8 send_is_chunked;
	u8 has_header;	    /* the header of the response has been sent */
	u8 is_chunked;
	u8 n_waiting;
	u8 spare[5];
	struct waiting waiting[N_WAITING];
};

#endif
