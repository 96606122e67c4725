/* The kind of memory of an address; host memory that CUDA does not know is pageable. */
#ifndef EMULATED_MEMORY_H
#define EMULATED_MEMORY_H

#include <stdbool.h>

enum memory { ON_DEVICE, PINNED };

bool memory_has(const void *address, enum memory kind);

#endif
