"""An image goes to a registry: what is to be done (``plan``), doing it (``run``), and what was done (``report``)."""

from buildkit.push.plan import Action, PlannedBlob, PushPlan, Target
from buildkit.push.report import PushReport
from buildkit.push.run import PushOptions, plan_push, push

__all__ = ["Action", "PlannedBlob", "PushOptions", "PushPlan", "PushReport", "Target", "plan_push", "push"]
