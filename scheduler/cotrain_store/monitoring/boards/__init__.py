"""The boards of Grafana and the alerts of Prometheus, as lists; `make boards` writes their files."""
