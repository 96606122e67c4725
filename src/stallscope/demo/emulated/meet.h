/*
 * The meeting place of the ranks of one communicator: a shared memory segment named after the communicator's id.
 *
 * A collective's kernel enters its round, waits until the round releases it and leaves. Synchronising operations
 * release no rank before the last has entered. A root that only sends (and a rank that only sends to the root) may
 * leave at once if its data fits the buffers (EAGER_BYTES); the others wait for it. Ranks that disagree on the round's
 * operation are stuck for ever, as with NCCL. Rounds are bounded: no rank runs more than N_SLOTS ahead. Payloads up to
 * PAYLOAD_BYTES really travel.
 */
#ifndef EMULATED_MEET_H
#define EMULATED_MEET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_RANKS 64
#define ID_BYTES 128
#define PAYLOAD_BYTES 256
#define EAGER_BYTES (1 << 20)
#define EAGER_MESSAGES 8

enum pattern { ALL_TO_EACH, ONE_TO_ALL, ALL_TO_ONE };

struct round {
	int64_t number;      /* n-th collective of this rank on the communicator, from 0 */
	enum pattern pattern;
	int root;
	uint64_t signature;  /* operation, datatype, count: the ranks must agree on these */
	size_t n_bytes;      /* the rank's contribution */
	const void *payload; /* NULL: nothing travels */
};

struct place;

/* NULL without shared memory. */
struct place *place_open(const unsigned char id[ID_BYTES], int nranks);
void place_close(struct place *place);
void place_wait_all_joined(struct place *place);

void round_enter(struct place *place, int rank, const struct round *round);
/* Returns when the data was available (the last needed entry, ns), or -1 when *aborted became true. */
int64_t round_wait(struct place *place, int rank, const struct round *round, const _Atomic bool *aborted);
/* The payload of a rank, valid between round_wait and round_leave. */
const void *round_payload(struct place *place, const struct round *round, int rank);
void round_leave(struct place *place, const struct round *round);

/* Point to point: the n-th send of a pair meets its n-th receive. Both return n. */
uint64_t message_send(struct place *place, int from, int to);
uint64_t message_receive(struct place *place, int from, int to);
bool message_wait_received(struct place *place, int from, int to, uint64_t n, size_t n_bytes,
			   const _Atomic bool *aborted);
bool message_wait_sent(struct place *place, int from, int to, uint64_t n, const _Atomic bool *aborted);

/* On the host: every rank passes two numbers and gets the numbers of all ranks; n-th call of each rank belong
 * together. */
void exchange(struct place *place, int rank, uint64_t n, const int64_t mine[2], int64_t all[MAX_RANKS][2]);
/* One rank hands an id to the others; n counts these on the communicator. */
void id_give(struct place *place, uint64_t n, const unsigned char id[ID_BYTES]);
void id_take(struct place *place, uint64_t n, unsigned char id[ID_BYTES]);

uint64_t hash_bytes(const void *bytes, size_t n, uint64_t seed);

#endif
