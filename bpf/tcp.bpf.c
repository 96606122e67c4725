// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Segments that TCP retransmits. This happens in an interrupt, in any task. The owner is the process that holds the
 * socket, so retransmits are counted by the number of the socket's file, which user space finds among the descriptors
 * of the traced processes. They are only counted, so that a lossy network cannot flood the ring. */
#include "host.h"

#define N_SOCKETS 1024

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_SOCKETS);
	__type(key, u64);
	__type(value, struct resent);
} resent SEC(".maps");

SEC("?tp_btf/tcp_retransmit_skb")
int BPF_PROG(tcp_resent, struct sock *sk)
{
	u64 inode = BPF_CORE_READ(sk, sk_socket, file, f_inode, i_ino);
	s64 now = bpf_ktime_get_ns();
	struct resent *found, new = {};

	if (!inode)
		return 0;
	found = bpf_map_lookup_elem(&resent, &inode);
	if (found) {
		__sync_fetch_and_add(&found->n, 1);
		found->last_ns = now;
		return 0;
	}
	new.n = 1;
	new.first_ns = new.last_ns = now;
	ends_of(&new.ends, sk);
	BPF_CORE_READ_STR_INTO(&new.interface, sk, sk_dst_cache, dev, name);
	bpf_map_update_elem(&resent, &inode, &new, BPF_ANY);
	return 0;
}
