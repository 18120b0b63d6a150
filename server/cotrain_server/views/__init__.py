"""What answers, dashboards and Prometheus show; reads, and changes nothing."""
