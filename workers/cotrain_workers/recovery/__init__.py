"""Crash recovery: snapshots, replay, rollback and bisection, independent of commits and schedules."""
