"""Content of answers, dashboards and Prometheus metrics. Read only."""
