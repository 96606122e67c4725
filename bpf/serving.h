/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Records of requests that a server answers over HTTP/1.1 or gRPC. Their only definition, as in events.h. */
#ifndef STALLSCOPE_SERVING_H
#define STALLSCOPE_SERVING_H

#include "events.h"

#define N_METHOD 4
#define N_PATH 64 /* a power of two */
#define N_MODEL 40

enum request_flag {
	REQUEST_STREAMS = 1,	/* the response body came in parts: each part is a token */
	REQUEST_ABORTED = 2,	/* the connection was closed before the end of the response */
	REQUEST_PIPELINED = 4,	/* it arrived before the end of the response to the request before it */
	REQUEST_CLIENT_LEFT = 8, /* the client closed its side before the end of the response */
	REQUEST_UNANSWERED = 16, /* no byte of the response was sent */
	REQUEST_FAILED = 32,	/* a gRPC call failed, by its status */
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
	s64 gap_at_ns;	    /* and its start */
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
	u8 huffman_bytes; /* of path, if it has the code of HTTP/2's headers; 0: it is text */
	char method[N_METHOD]; /* ends with a zero if it is shorter */
	u32 client;	     /* keyed hash of the client's address; 0: a Unix socket */
	char path[N_PATH];
	char model[N_MODEL]; /* of a gRPC request to Triton; otherwise empty */
	u64 id_hash;	     /* FNV-1a of the id in the response's JSON: {"id":"..."; 0: none */
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
	u8 is_filled;	    /* full_since_ns is a write that filled the socket, not a write that failed */
	u32 client;	    /* as in struct request_event */
	struct waiting waiting[N_WAITING];
};

/* ---- HTTP/2 ---- */

#define N_FRAME_HEADER 9
#define N_PREFIX 5 /* of a gRPC message: is it compressed, and its length */

struct frames { /* the bytes of one direction of a connection */
	u32 left;	   /* bytes of the payload that are still to come */
	u32 stream;
	u64 value;	   /* the last bytes of a payload that is a number */
	u8 header[32];	   /* N_FRAME_HEADER bytes, and room for the largest read */
	u8 n_header;	   /* bytes of the header that have come */
	u8 type;
	u8 flags;
	u8 padding;	   /* bytes at the end of the payload */
	u8 needs_padding;  /* the next byte is their number */
	u8 skip;	   /* bytes of the priority before the fields */
	u8 n_value;	   /* bytes of a setting that have come */
	u8 ends_stream;	   /* the fields of a response that are being read are its end */
};

struct fields { /* the state of HPACK (RFC 7541): the fields of one direction */
	u64 name;	/* its last 8 letters */
	u32 n_inserted; /* into the dynamic table */
	u32 number;	/* being read */
	u32 text_left;
	u32 value_hash;
	u8 state;
	u8 shift;
	u8 is_wanted;	/* the value of the field is read: the path of a request, the status of a response */
	u8 is_inserted; /* the field goes into the dynamic table */
	u8 is_huffman;
	u8 name_bytes;	/* 0: the name is too long for a wanted field */
	u8 value_bytes;
	u8 huffman_bytes;
	u8 kind;
	u8 is_out;	/* the fields of responses */
	u8 spare[6];
	char value[N_PATH]; /* the wanted value of the fields that are being read */
};

struct http2 { /* a connection */
	u64 id;		/* of this connection; the kernel reuses the addresses of sockets */
	s64 arrived_ns; /* as in struct connection */
	s64 full_since_ns;
	s64 blocked_ns; /* sum of the times in which the socket was full */
	s64 window;	/* bytes that the client takes, on all streams */
	s64 opened_ns;	/* the window was used up, and the client has opened it again */
	s64 stream_window; /* of a new stream */
	u32 ends_stream;   /* the request whose fields are being read has no body */
	u32 n_open;
	u32 client;	  /* as in struct request_event */
	u8 knows_windows; /* the connection is known from its start on */
	u8 spare[3];
	struct frames in;
	struct frames out;
	struct fields in_fields;
	struct fields out_fields;
};

struct stream_key {
	u64 connection;
	u32 stream;
	u32 is_out; /* of http2_values: as in struct fields */
};

struct message { /* the gRPC messages of one direction of a stream */
	u32 left;
	u8 n_prefix;
	u8 is_begun;   /* a part of its body has come */
	u8 prefix[14]; /* N_PREFIX bytes, and room for the largest read */
};

struct stream { /* a request on it */
	struct request_event request;
	s64 blocked_before_ns; /* of the connection, at its start */
	s64 credit;	       /* bytes that the client takes beyond stream_window, less the bytes sent */
	s64 stalled_ns;	       /* the client takes no data since; 0: it does */
	s64 opened_ns;
	struct message in;
	struct message out;
	u32 n_messages; /* of the response */
	u8 is_half_closed; /* the client has sent the whole request */
	u8 is_plain;	   /* the body does not consist of gRPC messages */
	u8 n_headers;	   /* frames of header fields that the server has sent, at most 2 */
	u8 spare[1];
};

#endif
