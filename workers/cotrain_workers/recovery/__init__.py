"""What a crash costs: snapshots, replay, rollback, bisection; knows no commit and no schedule."""
