"""What `./dev test` runs of the suite; all of it takes ten minutes, which only `./dev prove` has.

Chosen are whole cases, with all their parameters: in each section those on which the most other
rules rest, and of these the ones that do not wait for a limit to pass. They cost about a minute.
"""

from __future__ import annotations

from collections.abc import Mapping

SAMPLE: Mapping[str, tuple[str, ...]] = {
    "test_api.py": (
        "test_result_is_json",
        "test_error_is_a_line_of_text",
        "test_head_is_get_without_a_body",
        "test_wrong_method_on_a_post_route_is_405",
        "test_unknown_path_and_trailing_slash_are_404",
        "test_body_that_is_not_one_document_is_400",
        "test_healthcheck_names_service_and_version",
        "test_same_id_is_409_whatever_the_status",
        "test_task_info_has_the_keys_and_types_servers_parse",
        "test_terminate_answers_when_the_container_has_ended",
        "test_remove_before_terminate_is_409",
        "test_removed_task_is_unknown_and_its_id_free",
    ),
    "test_submit_body.py": ("test_impossible_limits_are_refused",),
    "test_strangers.py": ("test_another_name_is_refused",),
    "test_statuses.py": (
        "test_statuses_come_in_order",
        "test_code_0_is_done_by_runner",
        "test_last_lines_hold_both_streams",
        "test_silent_failure_names_its_code",
        "test_failed_preparation_says_why",
        "test_first_reason_stays",
        "test_empty_reason_ends_the_task_and_records_nothing",
        "test_terminate_stops_a_pull_within_a_second",
        "test_timeout_0_kills_at_once",
    ),
    "test_container.py": (
        "test_labels_name_the_task",
        "test_runner_is_started_with_the_shims_settings",
        "test_runner_and_its_folder_are_mounted",
        "test_missing_instance_path_is_created_for_everybody",
    ),
    "test_container_settings.py": (
        "test_bridge_reports_both_ports_and_nothing_else",
        "test_host_network_reports_no_ports",
        "test_cpu_and_memory_are_limits",
        "test_remove_takes_anonymous_volumes_along",
    ),
    "test_gpus.py": (
        "test_each_task_gets_gpus_of_its_own",
        "test_too_few_idle_gpus_fail_the_task_and_take_none",
        "test_nvidia_gpus_are_one_device_request",
        "test_amd_gpus_are_render_nodes",
    ),
    "test_pull.py": (
        "test_local_image_is_not_pulled",
        "test_credentials_go_into_the_header",
        "test_refused_pull_says_what_the_registry_said",
        "test_stream_without_a_final_status_is_a_failure",
        "test_error_in_the_stream_reaches_the_user",
        "test_progress_follows_a_layer_to_its_end",
    ),
    "test_disk.py": (
        "test_task_dir_is_private_and_the_jobs_part_is_not",
        "test_remove_deletes_the_dir",
        "test_record_is_one_json_object_and_a_newline",
        "test_config_is_the_body_with_defaults_and_without_credentials",
        "test_credentials_of_the_whole_run_are_nowhere",
    ),
    "test_command_line.py": (
        "test_version_is_three_words",
        "test_usage_error_exits_1",
        "test_start_without_docker_is_given_up_soon",
        "test_missing_runner_is_not_fatal",
        "test_signal_ends_the_shim_and_no_container",
    ),
    "test_components.py": (
        "test_both_components_are_listed",
        "test_missing_runner_is_not_installed",
        "test_runner_is_installed_in_the_background",
        "test_sha256_decides",
    ),
    "test_restart.py": (
        "test_first_answer_has_what_happened_meanwhile",
        "test_recorded_reason_survives",
        "test_accepted_submit_is_known_after_a_kill_right_after",
        "test_second_shim_on_a_home_is_refused",
        "test_containers_of_another_home_are_left_alone",
    ),
    "test_host.py": (
        "test_odd_nvidia_rows",
        "test_host_info_describes_the_host",
    ),
    "test_metrics.py": ("test_metrics_are_those_of_the_tasks_gpus",),
    "test_volumes.py": (
        "test_partition_table_is_never_formatted_away",
        "test_blank_disk_is_formatted_for_everybody",
        "test_volume_is_mounted_as_it_is",
        "test_volume_is_unmounted_when_the_task_has_ended",
        "test_one_bad_volume_unmounts_the_good_ones",
        "test_volume_of_two_tasks_stays_until_the_last_has_ended",
    ),
    "test_keys.py": (
        "test_key_is_there_while_its_task_lives",
        "test_lines_of_others_stay_even_with_the_same_key",
        "test_owner_and_mode_survive",
    ),
}
