/* How the library's names are exported. */
#ifndef EMULATED_NCCL_NAMES_H
#define EMULATED_NCCL_NAMES_H

/* Each function exists a second time as pnccl..., at the same address. */
#define NCCL(name) __attribute__((alias(#name), visibility("default"))) extern __typeof__(name) p##name

#endif
