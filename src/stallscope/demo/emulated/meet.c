/* The meeting place of a communicator's ranks in shared memory: see meet.h. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "device.h"
#include "meet.h"

#define N_SLOTS 64
#define POLL_NS 500000
#define CHECK_NS 50000000

/* A round in progress. All zero is an unused slot: the segment needs no set-up. */
struct slot {
	int64_t number_plus_1;
	uint64_t signature;
	int64_t last_in_ns, root_in_ns;
	uint32_t n_in, n_out;
	bool is_broken;
	_Atomic uint32_t bell;
	unsigned char payloads[MAX_RANKS][PAYLOAD_BYTES];
};

struct channel {
	_Atomic uint64_t n_sent, n_received;
	_Atomic uint32_t bell;
};

struct exchange_slot {
	_Atomic uint64_t n_given[MAX_RANKS];
	int64_t given[MAX_RANKS][2];
};

struct place {
	_Atomic uint32_t lock; /* 0 free, 1 held, 2 held and wanted */
	_Atomic uint32_t n_joined;
	uint32_t nranks;
	struct slot slots[N_SLOTS];
	struct channel channels[MAX_RANKS][MAX_RANKS];
	struct exchange_slot exchanges[2]; /* no rank is ahead of another by more than one */
	_Atomic uint64_t n_ids;
	unsigned char id[ID_BYTES];
};

uint64_t hash_bytes(const void *bytes, size_t n, uint64_t seed)
{
	const unsigned char *at = bytes;
	uint64_t hash = seed ^ 0xcbf29ce484222325ULL;

	while (n--)
		hash = (hash ^ *at++) * 0x100000001b3ULL;
	return hash;
}

static void lock(struct place *place)
{
	uint32_t seen = 0;

	if (atomic_compare_exchange_strong(&place->lock, &seen, 1))
		return;
	while (atomic_exchange(&place->lock, 2))
		futex_wait(&place->lock, 2, -1);
}

static void unlock(struct place *place)
{
	if (atomic_exchange(&place->lock, 0) == 2)
		futex_wake_all(&place->lock);
}

/* EMULATED_NCCL_NAME separates jobs, so that the segments of a killed job can be found and removed. */
static void segment_name(const unsigned char id[ID_BYTES], char name[96])
{
	const char *job = getenv("EMULATED_NCCL_NAME");

	snprintf(name, 96, "/emulated-nccl-%.40s-%016llx", job ? job : "0",
		 (unsigned long long)hash_bytes(id, ID_BYTES, 0));
}

struct place *place_open(const unsigned char id[ID_BYTES], int nranks)
{
	struct place *place;
	char name[96];
	int fd;

	segment_name(id, name);
	fd = shm_open(name, O_RDWR | O_CREAT, 0600);
	if (fd < 0)
		return NULL;
	place = ftruncate(fd, sizeof(*place)) ? MAP_FAILED :
		mmap(NULL, sizeof(*place), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (place == MAP_FAILED)
		return NULL;
	place->nranks = (uint32_t)nranks;
	if (atomic_fetch_add(&place->n_joined, 1) + 1 == (uint32_t)nranks)
		shm_unlink(name);
	return place;
}

void place_close(struct place *place)
{
	munmap(place, sizeof(*place));
}

void place_wait_all_joined(struct place *place)
{
	while (place->n_joined < place->nranks)
		sleep_until(now_ns() + POLL_NS);
}

/* On the device's side: the rank may have been aborted or ended since. */
static void wait_a_while(_Atomic uint32_t *bell, uint32_t seen)
{
	futex_wait(bell, seen, CHECK_NS);
	emulated_end_with_owner();
}

static void ring(_Atomic uint32_t *bell)
{
	(*bell)++;
	futex_wake_all(bell);
}

static struct slot *slot_of(struct place *place, const struct round *round)
{
	return &place->slots[round->number % N_SLOTS];
}

/* Called with the lock held, and returns with it held. */
static struct slot *claim(struct place *place, const struct round *round)
{
	struct slot *slot = slot_of(place, round);

	while (slot->number_plus_1 != round->number + 1) {
		uint32_t bell = slot->bell;

		if (!slot->number_plus_1 || slot->n_out == place->nranks) {
			slot->number_plus_1 = round->number + 1;
			slot->signature = round->signature;
			slot->n_in = slot->n_out = 0;
			slot->is_broken = false;
			slot->root_in_ns = 0;
			break;
		}
		unlock(place);
		wait_a_while(&slot->bell, bell);
		lock(place);
	}
	return slot;
}

void round_enter(struct place *place, int rank, const struct round *round)
{
	struct slot *slot;

	lock(place);
	slot = claim(place, round);
	slot->last_in_ns = now_ns();
	if (slot->signature != round->signature)
		slot->is_broken = true;
	if (round->pattern != ALL_TO_EACH && rank == round->root)
		slot->root_in_ns = slot->last_in_ns;
	if (round->payload)
		memcpy(slot->payloads[rank], round->payload, round->n_bytes);
	slot->n_in++;
	if (slot->n_in == place->nranks || slot->root_in_ns == slot->last_in_ns)
		ring(&slot->bell);
	unlock(place);
}

/* When the data that a rank needs was available; 0 while it is not. */
static int64_t let_go_ns(const struct place *place, const struct slot *slot, int rank, const struct round *round)
{
	bool is_root = rank == round->root;
	bool is_eager = round->n_bytes <= EAGER_BYTES;

	if (slot->is_broken)
		return 0;
	if (slot->n_in == place->nranks)
		return slot->last_in_ns;
	if (round->pattern == ONE_TO_ALL && !is_root)
		return slot->root_in_ns;
	if (round->pattern != ALL_TO_EACH && is_eager && is_root == (round->pattern == ONE_TO_ALL))
		return now_ns();
	return 0;
}

int64_t round_wait(struct place *place, int rank, const struct round *round, const _Atomic bool *aborted)
{
	struct slot *slot = slot_of(place, round);

	while (!*aborted) {
		uint32_t bell = slot->bell;
		int64_t ns;

		lock(place);
		ns = let_go_ns(place, slot, rank, round);
		unlock(place);
		if (ns)
			return ns;
		wait_a_while(&slot->bell, bell);
	}
	return -1;
}

const void *round_payload(struct place *place, const struct round *round, int rank)
{
	return slot_of(place, round)->payloads[rank];
}

void round_leave(struct place *place, const struct round *round)
{
	struct slot *slot = slot_of(place, round);

	lock(place);
	slot->n_out++;
	if (slot->n_out == place->nranks)
		ring(&slot->bell);
	unlock(place);
}

uint64_t message_send(struct place *place, int from, int to)
{
	struct channel *channel = &place->channels[from][to];
	uint64_t n = channel->n_sent++;

	ring(&channel->bell);
	return n;
}

uint64_t message_receive(struct place *place, int from, int to)
{
	struct channel *channel = &place->channels[from][to];
	uint64_t n = channel->n_received++;

	ring(&channel->bell);
	return n;
}

bool message_wait_received(struct place *place, int from, int to, uint64_t n, size_t n_bytes,
			   const _Atomic bool *aborted)
{
	struct channel *channel = &place->channels[from][to];
	uint64_t n_buffered = n_bytes <= EAGER_BYTES ? EAGER_MESSAGES : 0;

	while (!*aborted) {
		uint32_t bell = channel->bell;

		if (channel->n_received + n_buffered > n)
			return true;
		wait_a_while(&channel->bell, bell);
	}
	return false;
}

bool message_wait_sent(struct place *place, int from, int to, uint64_t n, const _Atomic bool *aborted)
{
	struct channel *channel = &place->channels[from][to];

	while (!*aborted) {
		uint32_t bell = channel->bell;

		if (channel->n_sent > n)
			return true;
		wait_a_while(&channel->bell, bell);
	}
	return false;
}

void exchange(struct place *place, int rank, uint64_t n, const int64_t mine[2], int64_t all[MAX_RANKS][2])
{
	struct exchange_slot *slot = &place->exchanges[n % 2];

	memcpy(slot->given[rank], mine, sizeof(slot->given[rank]));
	slot->n_given[rank] = n + 1;
	for (uint32_t i = 0; i < place->nranks; i++) {
		while (slot->n_given[i] < n + 1)
			sleep_until(now_ns() + POLL_NS);
		memcpy(all[i], slot->given[i], sizeof(slot->given[i]));
	}
}

void id_give(struct place *place, uint64_t n, const unsigned char id[ID_BYTES])
{
	memcpy(place->id, id, ID_BYTES);
	place->n_ids = n + 1;
}

void id_take(struct place *place, uint64_t n, unsigned char id[ID_BYTES])
{
	while (place->n_ids < n + 1)
		sleep_until(now_ns() + POLL_NS);
	memcpy(id, place->id, ID_BYTES);
}
