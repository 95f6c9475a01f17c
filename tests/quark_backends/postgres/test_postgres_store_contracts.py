"""The tests of the store, over PostgreSQL: what readers, figures and compaction promise there."""

import pytest
import test_attempts
import test_compaction
import test_curves
import test_figures
import test_generations
import test_store_oracle
import test_store_robustness
from postgres_stores import PostgresStore
from test_attempts import (  # noqa: F401
    test_a_later_attempt_may_go_further_back_and_an_earlier_one_stays_hidden,
    test_points_from_the_step_on_are_hidden_and_can_be_asked_for,
    test_points_without_a_step_are_hidden_where_they_came_after_it,
    test_what_an_earlier_attempt_delivers_late_is_hidden_too,
    test_without_a_step_what_is_repeated_is_replaced,
)
from test_compaction import (  # noqa: F401
    test_a_batch_that_comes_again_after_compaction_changes_nothing,
    test_a_damaged_batch_is_set_aside_with_its_reason_and_the_rest_goes_on,
    test_a_damaged_chunk_is_told_and_the_rest_is_read,
    test_a_kind_that_only_a_newer_quark_knows_is_left_alone,
    test_any_records_in_any_order_are_read_as_they_were,
    test_chunks_grow_until_they_are_full_and_then_stay,
    test_compacted_batches_are_given_back_with_their_numbers,
    test_every_record_is_there_once_before_and_after,
    test_other_kinds_keep_their_rows_together_by_step,
    test_two_compactors_do_not_do_the_same_work_twice,
)
from test_curves import (  # noqa: F401
    test_a_damaged_rollup_costs_time_and_nothing_else,
    test_a_spike_of_one_point_is_in_every_reduction,
    test_curves_of_anything_agree_with_the_points,
    test_rollups_come_back_as_the_blocks_they_were,
    test_the_tail_that_is_not_compacted_is_part_of_the_curve,
)
from test_figures import test_figures_are_those_of_the_visible_points  # noqa: F401
from test_generations import (  # noqa: F401
    test_outputs_of_another_run_or_kind_are_refused,
    test_readers_take_everything_from_the_newest_replacing_one_on,
)
from test_offline_starts import (  # noqa: F401
    test_a_process_does_not_take_its_own_start_for_another_ones,
    test_a_start_may_come_after_those_that_followed_it,
    test_a_start_that_comes_again_is_one_attempt,
    test_both_are_shown_where_they_did_the_same_steps_again,
    test_of_two_that_began_one_attempt_the_second_gets_the_next,
    test_points_that_came_before_the_start_move_with_it,
    test_what_the_first_says_of_itself_changes_the_run_no_more,
)
from test_store_oracle import (  # noqa: F401
    small_chunks,
    test_any_curve_holds_every_point_and_every_extreme,
    test_any_query_of_any_store_is_answered_as_a_list_would,
)
from test_store_robustness import (  # noqa: F401
    test_a_batch_of_a_newer_format_is_left_alone,
    test_a_curve_of_which_all_is_hidden_is_empty,
    test_a_curve_of_which_little_is_visible_shows_every_point_that_fits,
    test_a_damaged_batch_never_raises_out_of_the_summaries,
    test_a_lack_of_memory_is_not_taken_for_damage,
    test_a_malformed_batch_is_rejected_and_never_spoils_reading,
    test_a_missing_codec_does_not_empty_the_figures_of_a_resumed_run,
    test_a_missing_codec_is_a_clear_error_of_the_store,
    test_a_rollup_with_any_wrong_byte_is_not_believed,
    test_compaction_takes_no_batch_whose_checksum_is_wrong,
    test_figures_are_right_where_a_late_batch_hides_points_without_a_step,
    test_figures_are_right_where_a_resume_comes_in_one_group_with_what_it_hides,
    test_means_of_huge_values_are_means,
    test_parts_of_many_metrics_are_not_single_rows,
    test_the_widest_steps_are_read_after_compaction,
    test_what_a_reader_returns_cannot_change_what_it_returns_next,
    without_pcodec,
)

# What the store promises is in `make test` on SQLite.
pytestmark = pytest.mark.long
MODULES = (
    test_attempts,
    test_compaction,
    test_curves,
    test_figures,
    test_generations,
    test_store_oracle,
    test_store_robustness,
)


@pytest.fixture(autouse=True)
def stores_in_postgres(monkeypatch, postgres_database):
    """What the tests make themselves lies in PostgreSQL too."""
    for module in MODULES:
        if hasattr(module, "Store"):
            monkeypatch.setattr(module, "Store", lambda folder: PostgresStore(postgres_database))
        if hasattr(module, "connect"):
            monkeypatch.setattr(module, "connect", lambda layout: postgres_database.connect())
