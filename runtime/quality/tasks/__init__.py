"""A small suite of tasks that needs no network: one file per task, made from texts that no predictor saw (row B18)."""

from expertcast.runtime.quality.tasks.measuring import TaskScore, measure_tasks
from expertcast.runtime.quality.tasks.questions import Item, Task
from expertcast.runtime.quality.tasks.suite import TASKS, make_tasks

__all__ = ["TASKS", "Item", "Task", "TaskScore", "make_tasks", "measure_tasks"]
