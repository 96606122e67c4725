/* Collectives on a stream: enter every round of the operation, then wait for each, then take the time. */
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "collective.h"
#include "profiler.h"

#define NS_PER_COLLECTIVE 12000
#define BUS_BYTES_PER_NS 25

static const size_t datatype_bytes[N_DATATYPES] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };

/* One operation on one stream. */
struct batch {
	int n_parts, captured_mask;
	bool is_captured;
	struct part parts[];
};

/* A part under way. */
struct entry {
	struct round round;
	uint64_t message;
};

static size_t n_bytes_of(const struct part *part)
{
	return part->count * datatype_bytes[part->datatype];
}

static enum pattern pattern_of(enum kind kind)
{
	if (kind == BROADCAST || kind == SCATTER)
		return ONE_TO_ALL;
	return kind == REDUCE || kind == GATHER ? ALL_TO_ONE : ALL_TO_EACH;
}

static bool travels(const struct part *part)
{
	bool is_carried = part->kind == ALL_REDUCE || part->kind == ALL_GATHER || part->kind == BROADCAST;

	return is_carried && part->send && n_bytes_of(part) <= PAYLOAD_BYTES;
}

static int64_t duration_ns(const struct part *part)
{
	int64_t n_bytes = n_bytes_of(part);
	int n_peers = part->comm->nranks - 1;

	if (part->kind == ALL_REDUCE)
		n_bytes = 2 * n_bytes * n_peers / part->comm->nranks;
	else if (part->kind != SEND && part->kind != RECV && part->kind != BROADCAST && part->kind != REDUCE)
		n_bytes *= n_peers;
	return NS_PER_COLLECTIVE + n_bytes / BUS_BYTES_PER_NS;
}

static void enter(const struct part *part, struct entry *entry)
{
	struct comm *comm = part->comm;

	if (part->kind == SEND) {
		entry->message = message_send(comm->place, comm->rank, part->root);
		return;
	}
	if (part->kind == RECV) {
		entry->message = message_receive(comm->place, part->root, comm->rank);
		return;
	}
	entry->round = (struct round){
		.number = comm->n_rounds++,
		.pattern = pattern_of(part->kind),
		.root = part->root,
		.signature = (uint64_t)part->count << 16 | (uint64_t)part->datatype << 8 | (uint64_t)part->kind,
		.n_bytes = n_bytes_of(part),
		.payload = travels(part) ? part->send : NULL,
	};
	round_enter(comm->place, comm->rank, &entry->round);
}

/* Returns when the part's data was available, or -1 when the communicator was aborted. */
static int64_t wait_for(const struct part *part, const struct entry *entry)
{
	struct comm *comm = part->comm;
	bool is_there;

	if (part->kind == SEND)
		is_there = message_wait_received(comm->place, comm->rank, part->root, entry->message,
						 n_bytes_of(part), &comm->is_aborted);
	else if (part->kind == RECV)
		is_there = message_wait_sent(comm->place, part->root, comm->rank, entry->message, &comm->is_aborted);
	else
		return round_wait(comm->place, comm->rank, &entry->round, &comm->is_aborted);
	return is_there ? now_ns() : -1;
}

#define FOLD(type)                                                                                             \
	do {                                                                                                   \
		type *to = into, x;                                                                            \
		const char *from = values;                                                                     \
		for (size_t i = 0; i < n; i++) {                                                               \
			memcpy(&x, from + i * sizeof(x), sizeof(x));                                           \
			to[i] = op == 1 ? to[i] * x : op == 2 ? (x > to[i] ? x : to[i]) :                      \
				op == 3 ? (x < to[i] ? x : to[i]) : to[i] + x;                                 \
		}                                                                                              \
	} while (0)

/* ncclSum 0, Prod 1, Max 2, Min 3, Avg 4 (summed here). Types that C does not have are left as they are. */
static void fold(void *into, const void *values, size_t n, int datatype, int op)
{
	switch (datatype) {
	case 2:
		FOLD(int32_t);
		break;
	case 4:
		FOLD(int64_t);
		break;
	case 7:
		FOLD(float);
		break;
	case 8:
		FOLD(double);
		break;
	}
}

static void average(void *values, size_t n, int datatype, int nranks)
{
	for (size_t i = 0; i < n; i++) {
		if (datatype == 7)
			((float *)values)[i] /= (float)nranks;
		else if (datatype == 8)
			((double *)values)[i] /= nranks;
	}
}

static void receive(const struct part *part, const struct round *round)
{
	struct comm *comm = part->comm;
	_Alignas(16) unsigned char result[PAYLOAD_BYTES];
	size_t n_bytes = round->n_bytes;

	if (part->kind == BROADCAST) {
		memcpy(part->recv, round_payload(comm->place, round, part->root), n_bytes);
		return;
	}
	if (part->kind == ALL_GATHER) {
		for (int i = 0; i < comm->nranks; i++)
			memcpy((char *)part->recv + i * n_bytes, round_payload(comm->place, round, i), n_bytes);
		return;
	}
	memcpy(result, round_payload(comm->place, round, 0), n_bytes);
	for (int i = 1; i < comm->nranks; i++)
		fold(result, round_payload(comm->place, round, i), part->count, part->datatype, part->reduce_op);
	if (part->reduce_op == 4)
		average(result, part->count, part->datatype, comm->nranks);
	memcpy(part->recv, result, n_bytes);
}

static void finish(const struct part *part, const struct entry *entry)
{
	if (part->kind == SEND || part->kind == RECV)
		return;
	if (entry->round.payload && part->recv)
		receive(part, &entry->round);
	round_leave(part->comm->place, &entry->round);
}

static void run(struct stream *stream, void *arg, uint64_t n)
{
	struct batch *batch = arg;
	struct entry entries[batch->n_parts];
	int64_t start_ns = now_ns(), end_ns = 0;
	bool is_aborted = false;

	(void)stream;
	(void)n;
	for (int i = 0; batch->is_captured && i < batch->n_parts; i++) {
		struct part *part = &batch->parts[i];

		part->event = profiler_replayed(part->comm, part->kind, part->count, batch->captured_mask);
	}
	for (int i = 0; i < batch->n_parts; i++)
		enter(&batch->parts[i], &entries[i]);
	for (int i = 0; i < batch->n_parts; i++) {
		int64_t there_ns = wait_for(&batch->parts[i], &entries[i]);
		int64_t part_end_ns = there_ns + duration_ns(&batch->parts[i]);

		is_aborted |= there_ns < 0;
		end_ns = part_end_ns > end_ns ? part_end_ns : end_ns;
	}
	if (!is_aborted)
		sleep_until(end_ns);
	for (int i = 0; i < batch->n_parts && !is_aborted; i++)
		profiler_ran(batch->parts[i].comm, batch->parts[i].event, start_ns, now_ns());
	for (int i = 0; i < batch->n_parts && !is_aborted; i++)
		finish(&batch->parts[i], &entries[i]);
}

/* n_pending is the number of works that exist, not of running works: a captured work keeps its communicator. */
static void drop(void *arg)
{
	struct batch *batch = arg;

	for (int i = 0; i < batch->n_parts; i++)
		batch->parts[i].comm->n_pending--;
	free(batch);
}

static ncclResult_t enqueue_on_one_stream(const struct part *parts, int n_parts, int first)
{
	struct batch *batch = calloc(1, sizeof(*batch) + (size_t)n_parts * sizeof(*parts));

	if (!batch)
		return ncclSystemError;
	batch->is_captured = emulated_is_capturing(parts[first].comm->device, parts[first].stream);
	batch->captured_mask = batch->is_captured ? profiler_mask(parts[first].comm) : 0;
	for (int i = first; i < n_parts; i++) {
		if (parts[i].stream != parts[first].stream || parts[i].comm->device != parts[first].comm->device)
			continue;
		batch->parts[batch->n_parts++] = parts[i];
		parts[i].comm->n_pending++;
		if (!batch->is_captured)
			batch->parts[batch->n_parts - 1].event =
				profiler_enqueued(parts[i].comm, parts[i].kind, parts[i].count);
	}
	emulated_enqueue(parts[first].comm->device, parts[first].stream,
			 (struct work){ .run = run, .drop = drop, .arg = batch });
	return ncclSuccess;
}

ncclResult_t collective_enqueue(const struct part *parts, int n_parts)
{
	ncclResult_t result = ncclSuccess;

	for (int i = 0; i < n_parts && !result; i++) {
		bool is_new = true;

		for (int j = 0; j < i; j++)
			is_new &= parts[j].stream != parts[i].stream || parts[j].comm->device != parts[i].comm->device;
		if (is_new)
			result = enqueue_on_one_stream(parts, n_parts, i);
	}
	return result;
}
