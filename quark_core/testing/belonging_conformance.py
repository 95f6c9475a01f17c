"""Conformance of backends that know where runs belong, and what is said of groups and projects."""

from __future__ import annotations

import pytest

from quark_core.backends.belonging import BelongingEdit
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.edits import RunEdit
from quark_core.errors import SchemaValidationError
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord
from quark_core.runs.searching import build_search, find_runs
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Opener

_RUN = RUN_ID


class BelongingConformance(BackendKit):
    """Standard tests of backends that declare BELONGING."""

    def test_a_run_has_the_groups_and_fields_that_its_records_say(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Those of a batch that comes twice once; progress goes when the run ends."""
        backend = self._open_as(definition, open_backend, Capability.BELONGING)
        backend.write(maker.start())
        batch = maker.lifecycle(
            ("group", {"add": ["paper/fig3", "idea"]}),
            ("fields", {"set": {"gpu": "V100", "n": {"x": 1.5}}}),
            ("group", {"add": ["paper"], "remove": ["idea"]}),
            ("fields", {"set": {"n": 2}, "remove": ["gpu", "absent"]}),
            ("heartbeat", {"progress": {"done": 1.0, "total": 4.0}}),
        )
        backend.write(batch)
        backend.write(batch)
        stored = backend.load_run(_RUN)
        assert stored.run.groups == ("paper", "paper/fig3")
        assert dict(stored.fields) == {"n": 2}
        assert stored.progress is not None
        assert (stored.progress.done, stored.progress.total) == (1.0, 4.0)
        head = maker._head("fingerprint")
        backend.write(maker.batch([FingerprintRecord(*head, "code", SOURCES_KEY, "c0de")]))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        stored = backend.load_run(_RUN)
        assert (stored.progress, stored.digests.code) == (None, "c0de")
        for where, found in (
            ("'paper' in groups and field.n == 2", [_RUN]),
            ("group == 'idea'", []),
            ("code_digest == 'c0de' and fingerprint.sources == 'c0de'", [_RUN]),
        ):
            assert [r.run_id for r in find_runs(backend, build_search(where=where))] == found

    def test_projects_and_groups_are_described(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """What is said of them stays whatever their runs do; a run is grouped after its end too."""
        backend = self._open_as(definition, open_backend, Capability.BELONGING)
        backend.write(maker.start())
        backend.write(maker.lifecycle(("group", {"add": ["paper/fig3"]})))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        project = backend.load_run(_RUN).project.name
        edit = BelongingEdit(description="D", set_fields={"k": [1, None]}, add_tags=("b", "a"))
        made = backend.update_project(project, edit, by="anna@box")
        assert (made.description, made.tags, made.runs) == ("D", ("a", "b"), 1)
        assert backend.load_project(project) == made
        assert dict(made.fields) == {"k": [1, None]}
        with pytest.raises(SchemaValidationError):
            backend.update_project("absent", edit, by="anna@box")
        with pytest.raises(SchemaValidationError):
            backend.load_project("absent")
        backend.update_group(project, "paper", BelongingEdit(description="P"), by="anna@box")
        backend.update_group(project, "later", BelongingEdit(add_tags=("t",)), by="anna@box")
        backend.edit_run(_RUN, RunEdit(add_groups=("own",)), by="anna@box")
        groups = backend.list_groups(project)
        assert [(group.path, group.runs, group.description) for group in groups] == [
            ("later", 0, None),
            ("own", 1, None),
            ("paper", 1, "P"),
            ("paper/fig3", 1, None),
        ]
        backend.update_group(project, "later", BelongingEdit(remove_tags=("t",)), by="ben@box")
        assert backend.list_groups(project) == groups[1:]
        assert backend.list_groups("absent") == []
