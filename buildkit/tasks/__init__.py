"""The tasks, thin over the library: read the flags, call a function, print its report, give an exit code."""

from __future__ import annotations

from invoke.collection import Collection

import buildkit.tasks.check as check
import buildkit.tasks.deploy as deploy
import buildkit.tasks.doctor as doctor
import buildkit.tasks.evidence as evidence
import buildkit.tasks.images as images
import buildkit.tasks.login as login
import buildkit.tasks.pipeline as pipeline
import buildkit.tasks.smoke as smoke
import buildkit.tasks.split as split
import buildkit.tasks.stack as stack
import buildkit.tasks.workflows as workflows

__all__ = ["namespace"]

namespace = Collection()
for _task in (
    pipeline.pipeline,
    doctor.doctor,
    images.build,
    check.check,
    smoke.smoke,
    smoke.parity,
    split.split,
    images.push,
    images.pull_check,
    evidence.promote,
    evidence.evidence,
    login.login,
    login.logout,
    deploy.wheelhouse,
):
    namespace.add_task(_task)
for _name, _tasks in (
    ("stack", (stack.up, stack.down, stack.status)),
    ("deploy", (deploy.check, deploy.plan, deploy.pin)),
    ("workflows", (workflows.install, workflows.check, workflows.new, workflows.settings, workflows.summary)),
):
    _collection = Collection(_name)
    for _task in _tasks:
        _collection.add_task(_task)
    namespace.add_collection(_collection)
