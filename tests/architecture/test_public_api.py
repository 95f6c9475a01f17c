"""The names that `quark` exports are those of the public guide."""

import ast
import inspect
from pathlib import Path

import pytest

import quark

# Public API Map of the guide, names that can be imported from quark.
GUIDE = """
TrainingSession start_run resume_run end_run add_tag add_log RunContext RunRecord ProjectRecord
MetricsLogger MetricRecord EventLogger EventRecord LogIdentifier
SystemTelemetry SystemTelemetryConfig SystemTelemetryRecord
HookEngine HookEngineConfig HookScheduleConfig LayerFilterConfig LayerSummaryRecord
ParameterDiagnostics ParameterDiagnosticsConfig ParameterSummaryRecord ParameterDistributionRecord
ArtifactStore ArtifactRecord ARTIFACT_STORAGE_LAYOUT
DataDiagnostics DataDiagnosticsConfig BatchMetadata BatchMetadataAdapter MappingBatchMetadataAdapter
BatchDiagnosticRecord
AnalyzerEngine AnalyzerEngineConfig AnalyzerThresholds AnalyzerResult AlertRecord HealthScoreRecord
EvidenceRecord PhaseAnalyzer PhaseAnalyzerConfig PhaseAnalyzerThresholds PhaseAnalysisResult
PhaseRecord ComparisonEngine ComparisonEngineConfig MetricTargetSpec RunComparisonResult
migrate_store validate_record dump_record CURRENT_SCHEMA_VERSION SchemaValidationError
SchemaMigrationError SessionStoreError RunNotFoundError InvalidRunStateError
""".split()


# Ours, beyond the guide.
BEYOND = """
ArtifactDamagedError ArtifactLinkRecord ArtifactNotFoundError ArtifactVersion AttentionEntropy
BatchOutlier CSVBackend ChangeExplanation DataDiagnosticsSummary DeliveryReport
DiagnosticThresholds ExposureSummary HardBatchFinding Importances Instrument SourceFile
SourceSnapshot BackendDelivery LayeredConfig Layers LoggingHandler LossSummary MLflowBackend
MetricSummary NullTracker PendingArtifact QuarkError RankStatistics RetentionHookError RouterLoad
Routing RuleExplanation RunGroup RunProject RunReport RunSummary SampleExposure SampleLogger
SampleRecord SequenceLengthSummary Series SimilarRun StepTelemetryScope StopRequest StopRequested
StoredTrial Sweep SweepVerdict TraceStatistics TraceVersion Tracker TrackerBackend TrainingHalted
TrainingMonitor TrainingWatch Trial UsedArtifact WandbBackend __version__ best_run count_flops
edit_run explain_change find_samples find_similar_runs integers monitor open_run project
read_sources register_backend report search_runs series setup_tracker stop_run sweep trace
trace_statistics tracked uniform watch watch_data
""".split()


def test_the_names_of_the_guide_and_ours_are_exported_and_no_others():
    assert set(quark.__all__) == {*GUIDE, *BEYOND}


def test_all_is_sorted_and_true():
    assert quark.__all__ == sorted(quark.__all__)
    for name in quark.__all__:
        assert getattr(quark, name) is not None
    assert set(quark.__all__) <= set(dir(quark))
    assert set(quark._HOMES) == set(quark.__all__)
    with pytest.raises(AttributeError, match="absent"):
        quark.absent  # noqa: B018


def test_what_a_type_checker_sees_is_what_is_imported():
    stub = ast.parse(Path(quark.__file__).with_suffix(".pyi").read_text())
    seen = {
        each.asname: (line.module, each.name)
        for line in stub.body
        if isinstance(line, ast.ImportFrom) and line.module != "typing"
        for each in line.names
    }
    assert seen == {name: (home, name) for name, home in quark._HOMES.items()}


# Constructor and method reference of the guide: keyword-only arguments and their defaults.
SIGNATURES = {
    "TrainingSession.start_run": "project config=None tags=None parent_run_id=None"
    " storage_dir=None strict_mode=False",
    "TrainingSession.resume_run": "run_id storage_dir=None",
    "TrainingSession.reload": "",
    "TrainingSession.add_tag": "tag",
    "TrainingSession.add_log": "message identifier='Info' step=None epoch=None status=None"
    " payload=None timestamp=None event_type='user_log'",
    "TrainingSession.end_run": "status='completed'",
    "TrainingSession.to_dict": "",
    "MetricsLogger.__init__": "session batch_size=100",
    "MetricsLogger.log": "metric value step=None epoch=None namespace=None description=None"
    " metadata=None timestamp=None",
    "MetricsLogger.flush": "",
    "MetricsLogger.read": "metric_key=None namespace=None metric_name=None step=None step_min=None"
    " step_max=None epoch=None epoch_min=None epoch_max=None limit=None",
    "MetricsLogger.close": "",
    "EventLogger.__init__": "session batch_size=100",
    "EventLogger.log": "event_type severity=None step=None epoch=None status=None payload=None"
    " timestamp=None",
    "EventLogger.add_log": "message identifier='Info' step=None epoch=None status=None"
    " payload=None timestamp=None event_type='user_log'",
    "EventLogger.flush": "",
    "EventLogger.read": "event_type=None event_types=None severity=None step=None step_min=None"
    " step_max=None epoch=None epoch_min=None epoch_max=None limit=None",
    "EventLogger.close": "",
    "SystemTelemetry.__init__": "session config=None batch_size=20",
    "SystemTelemetry.start_step": "step epoch=None metadata=None",
    "SystemTelemetry.sample": "step=None epoch=None metadata=None timestamp=None",
    "SystemTelemetry.record_step": "step epoch=None step_time_ms=None data_time_ms=None"
    " compute_time_ms=None overflow_occurred=False skipped_step=False metadata=None timestamp=None",
    "SystemTelemetry.flush": "",
    "SystemTelemetry.read": "boundary=None step=None step_min=None step_max=None epoch=None"
    " epoch_min=None epoch_max=None limit=None",
    "SystemTelemetry.close": "",
    "StepTelemetryScope.mark_data_ready": "",
    "StepTelemetryScope.finish": "overflow_occurred=False skipped_step=False",
    "ArtifactStore.__init__": "session retention_hooks=None raise_on_retention_error=None",
    "ArtifactStore.store": "artifact_type name payload step=None epoch=None namespace=None"
    " payload_format=None metadata=None timestamp=None",
    # `values` may stand in place of both; every call of the guide means what it did.
    "ArtifactStore.log_histogram": "name values=None bins=64 counts=None step=None epoch=None"
    " namespace=None metadata=None timestamp=None",
    "ArtifactStore.log_snapshot": "name payload snapshot_type='batch_diagnostics_snapshot'"
    " step=None epoch=None namespace=None payload_format=None metadata=None timestamp=None",
    "ArtifactStore.read": "artifact_id=None artifact_type=None artifact_types=None namespace=None"
    " artifact_name=None artifact_key=None payload_format=None step=None step_min=None"
    " step_max=None epoch=None epoch_min=None epoch_max=None limit=None",
    "ArtifactStore.load": "artifact",
    "ArtifactStore.close": "",
    "DataDiagnostics.__init__": "session config=None",
    "DataDiagnostics.log_batch": "loss step=None epoch=None batch=None batch_size=None labels=None"
    " sample_ids=None sequence_lengths=None metadata=None timestamp=None",
    "DataDiagnostics.flush": "",
    "DataDiagnostics.read": "sample_id=None step=None step_min=None step_max=None epoch=None"
    " epoch_min=None epoch_max=None limit=None",
    "DataDiagnostics.summarize_exposure": "step=None step_min=None step_max=None epoch=None"
    " epoch_min=None epoch_max=None",
    "DataDiagnostics.find_hard_batches": "step=None step_min=None step_max=None epoch=None"
    " epoch_min=None epoch_max=None limit=10",
    "DataDiagnostics.summarize": "step=None step_min=None step_max=None epoch=None"
    " epoch_min=None epoch_max=None hard_batch_limit=10",
    "DataDiagnostics.close": "",
    "HookEngine.__init__": "session model optimizer=None config=None",
    "HookEngine.should_probe": "step",
    "HookEngine.begin_step": "step epoch=None",
    "HookEngine.end_step": "",
    "HookEngine.step": "step epoch=None",
    "HookEngine.flush": "",
    "HookEngine.read": "module_name=None module_type=None summary_type=None hook_direction=None"
    " step=None step_min=None step_max=None epoch=None epoch_min=None epoch_max=None limit=None",
    "HookEngine.close": "",
    "HookScheduleConfig.__init__": "every_n_steps=1 start_step=0 stop_step=None explicit_steps=()",
    "LayerFilterConfig.__init__": "include_names=() exclude_names=() include_types=()"
    " exclude_types=() include_name_patterns=() exclude_name_patterns=() leaf_modules_only=True",
    "DataDiagnosticsConfig.__init__": "batch_size=100 adapter=None outlier_z_score_threshold=2.5"
    " outlier_iqr_multiplier=1.5 hard_batch_percentile=0.9 min_batches_for_outlier_detection=5",
    "ParameterDiagnostics.__init__": "session model optimizer=None config=None",
    "ParameterDiagnostics.snapshot": "step epoch=None metadata=None",
    "ParameterDiagnostics.flush": "",
    "ParameterDiagnostics.read_summaries": "module_name=None module_type=None parameter_name=None"
    " parameter_role=None step=None step_min=None step_max=None epoch=None epoch_min=None"
    " epoch_max=None latest_only=False limit=None",
    "ParameterDiagnostics.read_distributions": "module_name=None module_type=None"
    " parameter_name=None parameter_role=None distribution_type=None step=None step_min=None"
    " step_max=None epoch=None epoch_min=None epoch_max=None latest_only=False limit=None",
    "ParameterDiagnostics.read": "",
    "ParameterDiagnostics.close": "",
    "ParameterDiagnosticsConfig.__init__": "schedule=<factory> batch_size=100"
    " capture_summaries=True capture_distributions=False distribution_types=('value',)"
    " histogram_bins=32 near_zero_epsilon=1e-08 max_histogram_values=100000"
    " include_parameter_patterns=() exclude_parameter_patterns=() include_parameter_roles=()",
    "AnalyzerEngine.__init__": "session config=None",
    "AnalyzerEngine.analyze": "replace_existing=None",
    "AnalyzerEngine.read_alerts": "rule_id=None category=None severity=None step=None step_min=None"
    " step_max=None limit=None",
    "AnalyzerEngine.read_health_scores": "score_key=None category=None limit=None",
    "PhaseAnalyzer.__init__": "session config=None",
    "PhaseAnalyzer.analyze": "replace_existing=None",
    "PhaseAnalyzer.read_phases": "phase_name=None step=None step_min=None step_max=None limit=None",
    "ComparisonEngine.__init__": "session config=None",
    "ComparisonEngine.compare": "other baseline=False",
    "ComparisonEngine.compare_to_baseline": "baseline_run",
    "ComparisonEngine.compare_runs": "primary reference baseline=False config=None",
    "ComparisonEngineConfig.__init__": "metric_targets=()",
    "MetricTargetSpec.__init__": "metric_key target_value direction",
    "AnalyzerEngineConfig.__init__": "thresholds=<factory> replace_existing_outputs=True"
    " step_time_metric_keys=('system/runtime/step_time_ms',#'system/step_time_ms')"
    " data_time_metric_keys=('system/runtime/data_time_ms',#'system/data_time_ms')"
    " compute_time_metric_keys=('system/runtime/compute_time_ms',#'system/compute_time_ms')",
    "PhaseAnalyzerConfig.__init__": "thresholds=<factory> replace_existing_outputs=True",
    "PhaseAnalyzerThresholds.__init__": "initialization_points=2"
    " rapid_learning_min_relative_change=0.18 stagnation_max_relative_change=0.01"
    " overfitting_min_gap=0.12 overfitting_min_train_relative_change=0.015"
    " overfitting_min_validation_regression=0.015 divergence_min_relative_regression=0.15"
    " divergence_from_best_ratio=0.25",
    "AnalyzerThresholds.__init__": "exploding_gradient_warning_norm=10.0"
    " exploding_gradient_error_norm=25.0"
    " exploding_gradient_critical_norm=50.0 vanishing_gradient_norm=0.0001"
    " vanishing_gradient_warning_ratio=0.5 vanishing_gradient_error_ratio=0.75"
    " vanishing_gradient_critical_ratio=0.9 vanishing_gradient_min_samples=4"
    " stagnant_layer_gradient_norm=0.0001 stagnant_layer_warning_probes=2"
    " stagnant_layer_error_probes=4 stagnant_layer_critical_probes=6"
    " activation_collapse_warning_dead_unit_ratio=0.8"
    " activation_collapse_error_dead_unit_ratio=0.92"
    " activation_collapse_critical_dead_unit_ratio=0.98"
    " activation_collapse_warning_saturation_ratio=0.9"
    " activation_collapse_error_saturation_ratio=0.97"
    " activation_collapse_critical_saturation_ratio=0.995"
    " activation_collapse_warning_std=0.05 activation_collapse_error_std=0.01"
    " activation_collapse_critical_std=0.001 overfitting_warning_gap=0.2"
    " overfitting_error_gap=0.4 overfitting_critical_gap=0.7 overfitting_min_points=3"
    " runtime_warning_step_time_ms=250.0 runtime_error_step_time_ms=500.0"
    " runtime_critical_step_time_ms=1000.0 runtime_warning_data_fraction=0.4"
    " runtime_error_data_fraction=0.6 runtime_critical_data_fraction=0.75"
    " runtime_warning_jitter_ratio=0.25 runtime_error_jitter_ratio=0.5"
    " runtime_critical_jitter_ratio=0.75",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_and_defaults(path):
    class_name, _, method = path.partition(".")
    function = getattr(getattr(quark, class_name), method)
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            default = parameter.default
            shown = repr(default).replace(" ", "#")
            suffix = "" if default is parameter.empty else f"={shown}"
            found.append(f"{parameter.name}{suffix}")
    wanted = SIGNATURES[path].split()
    # What we add comes after, with a default, so that no call of the guide changes.
    assert found[: len(wanted)] == wanted
    assert all("=" in extra for extra in found[len(wanted) :])


def test_public_functions_say_what_they_promise():
    for name in quark.__all__:
        value = getattr(quark, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for method, member in vars(value).items():
                if inspect.isfunction(member) and not method.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{method}"


@pytest.mark.parametrize(
    ("reader", "misspelt"),
    [
        (quark.MetricsLogger.read, "stepmin"),
        (quark.MetricsLogger.columns, "equals"),
        (quark.EventLogger.read, "rank"),
        (quark.DataDiagnostics.find_hard_batches, "sample_id"),
    ],
)
def test_an_argument_that_a_reader_does_not_know_is_refused_by_name(reader, misspelt):
    with pytest.raises(TypeError, match=rf"{reader.__qualname__}\(\) .*'{misspelt}'"):
        reader(None, **{misspelt: 1})
