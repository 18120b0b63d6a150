"""Web pages for operators and tenants under `/ui`, without a build step."""
