"""What a death costs: snapshots, replay, rollback, bisection."""
