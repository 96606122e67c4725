"""All programs derive the thresholds from the settings in the same way."""

from stallscope.diagnose.thresholds import Thresholds, thresholds_of
from stallscope.settings import Settings


def test_the_settings_defaults_are_the_thresholds_own():
    assert thresholds_of(Settings()) == Thresholds()


def test_each_setting_of_the_diagnosis_is_a_threshold():
    chosen = Settings(
        min_late_ms=7.5, min_late_steps=6, cause_share=0.9, hang_after_s=30.0, hang_gap_factor=8.0
    )
    assert thresholds_of(chosen) == Thresholds(
        min_late_ns=7_500_000,
        min_late_steps=6,
        cause_share=0.9,
        hang_after_ns=30_000_000_000,
        hang_gap_factor=8.0,
    )
