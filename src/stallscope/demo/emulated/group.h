/* Groups: the calls of a thread between ncclGroupStart and the outermost ncclGroupEnd are executed at the end. */
#ifndef EMULATED_GROUP_H
#define EMULATED_GROUP_H

#include "collective.h"

void group_begin(void);
bool group_is_open(void);
ncclResult_t group_end(void);
void group_forget(void); /* ends without executing the calls */

/* Enqueues the part, now or at the group's end. */
ncclResult_t group_submit(struct part part);
/* Waits until all ranks have joined, now or at the group's end. */
ncclResult_t group_await_joined(struct comm *comm);

#endif
