"""What the operator changes: checked, done and noted in the audit log; knows no route and no page."""
