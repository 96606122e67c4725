"""The known cases: the test of each, or the reason why it has no test."""

from typing import NamedTuple


class Known(NamedTuple):
    """One case. test: function in tests/diagnose/test_cases.py. why_not: the reason for a missing test."""

    test: str = ""
    why_not: str = ""

    @property
    def description(self) -> str:
        """The name of the test as words."""
        words = self.test.removeprefix("test_").split("_")
        return " ".join(word for word in words if not (word[:1] in "cdgnp" and word[1:].isdigit()))


CASES: dict[str, Known] = {
    "c01": Known("test_c01_200_ms_in_the_backward_pass_of_one_rank"),
    "c02": Known("test_c02_a_loader_of_150_ms_a_batch_on_one_rank"),
    "c04": Known("test_c04_c05_garbage_is_collected_on_another_rank_each_time"),
    "c05": Known("test_c04_c05_garbage_is_collected_on_another_rank_each_time"),
    "c07": Known("test_c07_too_many_threads_on_all_ranks_accuse_none"),
    "c08": Known("test_c08_ten_times_slower_on_all_ranks_is_reported_without_a_name"),
    "c10": Known("test_c10_one_cpu_for_all_threads_of_a_rank"),
    "c11": Known("test_c11_all_workers_on_the_same_cores_accuse_none"),
    "c13": Known("test_c13_a_cpu_limit_halves_the_speed_of_one_rank"),
    "c14": Known("test_c14_a_cpu_quota_is_used_up_again_and_again"),
    "c16": Known("test_c16_memory_of_the_other_socket_makes_one_rank_slower"),
    "c17": Known("test_c17_a_slow_clock_makes_all_ranks_of_a_host_slow"),
    "c19": Known("test_c19_an_upload_in_threads_holds_the_interpreter_for_dozens_of_steps_after_a_save"),
    "c20": Known("test_c20_staging_a_checkpoint_copies_for_seconds"),
    "c22": Known("test_c22_small_random_jitter_is_healthy"),
    "c23": Known(
        why_not="Not proven, and about one process without peers. With peers: the late rank and its state."
    ),
    "c25": Known(
        why_not="Public data: tests/importers/test_flight_recorder.py, and the table of public data above."
    ),
    "d01": Known("test_d01_the_storage_freezes_a_rank_every_num_workers_steps"),
    "d03": Known("test_d03_too_few_workers_on_all_ranks_accuse_none"),
    "d04": Known("test_d04_ten_minutes_between_epochs_on_all_ranks_are_not_a_hang"),
    "d06": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "d07": Known(
        why_not="Public data: tests/importers/test_node_database.py, and the table of public data above."
    ),
    "d09": Known("test_d09_one_rank_saves_while_the_others_go_on"),
    "d10": Known("test_d10_the_peers_wait_for_the_long_save_of_rank_0"),
    "d12": Known("test_d12_one_storage_target_is_slow"),
    "d13": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "d15": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "d16": Known(
        why_not="Memory that grows leaves no call or off-CPU interval behind: these records cannot show it."
    ),
    "d18": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "d19": Known("test_d19_memory_compaction_holds_one_rank"),
    "d21": Known("test_d21_a_driver_call_that_does_not_return"),
    "g01": Known("test_g01_g03_g04_the_allocator_of_one_rank_frees_and_asks_again"),
    "g03": Known("test_g01_g03_g04_the_allocator_of_one_rank_frees_and_asks_again"),
    "g04": Known("test_g01_g03_g04_the_allocator_of_one_rank_frees_and_asks_again"),
    "g06": Known("test_g06_g07_hidden_synchronise_calls_of_one_rank"),
    "g07": Known("test_g06_g07_hidden_synchronise_calls_of_one_rank"),
    "g09": Known("test_g09_g12_blocking_copies_from_pageable_memory"),
    "g10": Known("test_g10_all_ranks_synchronise_before_each_step"),
    "g12": Known("test_g09_g12_blocking_copies_from_pageable_memory"),
    "g13": Known("test_g13_pinning_memory_on_the_hot_path"),
    "g15": Known("test_g15_a_job_bound_by_its_launches_is_healthy"),
    "g16": Known("test_g16_checks_left_on_by_all_ranks_accuse_none"),
    "g18": Known("test_g18_a_hot_gpu_is_named_by_its_own_times"),
    "g19": Known("test_g19_a_gpu_that_is_5_percent_slower_raises_no_alarm"),
    "g21": Known("test_g21_another_job_on_the_gpu"),
    "g22": Known(
        why_not="Public data: tests/importers/test_flight_recorder.py, and the table of public data above."
    ),
    "g24": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "n01": Known("test_n01_a_slow_pcie_link_makes_the_copies_of_one_rank_long"),
    "n03": Known("test_n03_a_node_that_is_a_third_of_a_percent_slower_raises_no_alarm"),
    "n04": Known(
        why_not="Link states are not recorded, so links that are idle or missing by design raise no alarm."
    ),
    "n06": Known(why_not="The job fails before its first collective, so no round exists."),
    "n07": Known("test_n07_a_fabric_that_becomes_slow_names_no_rank"),
    "n09": Known("test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank"),
    "n10": Known("test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank"),
    "n12": Known("test_n12_p17_a_standstill_after_all_ranks_entered_names_no_rank"),
    "n13": Known("test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank"),
    "n15": Known("test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named"),
    "n16": Known("test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank"),
    "p02": Known("test_p02_sizes_differ"),
    "p03": Known("test_p03_two_ranks_take_two_communicators_in_another_order"),
    "p05": Known("test_p05_one_rank_decides_otherwise_by_its_clock"),
    "p06": Known("test_p06_a_hidden_collective_that_some_ranks_wait_in"),
    "p08": Known("test_p08_the_ranks_of_one_node_compile_while_the_others_wait"),
    "p09": Known("test_p09_a_rank_compiles_again_for_each_length"),
    "p11": Known("test_p11_a_long_first_call_is_benign"),
    "p12": Known("test_p12_one_rank_prepares_for_half_an_hour_before_the_first_barrier"),
    "p14": Known("test_p14_p15_a_long_start_of_all_ranks_is_not_a_straggler"),
    "p15": Known("test_p14_p15_a_long_start_of_all_ranks_is_not_a_straggler"),
    "p17": Known("test_n12_p17_a_standstill_after_all_ranks_entered_names_no_rank"),
    "p18": Known("test_p18_the_many_behind_are_named_not_the_two_ahead"),
    "p20": Known(why_not="States of idle links are not recorded, so they raise no alarm."),
    "p21": Known("test_p21_experts_without_tokens_are_uneven_work_not_bad_machines"),
    "p23": Known("test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank"),
    "p24": Known("test_p24_a_hang_names_the_rank_that_is_missing"),
}
