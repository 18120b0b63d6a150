"""The Helm chart, rendered by Helm itself: needs the dependency group `chart`."""
