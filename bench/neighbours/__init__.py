"""Bad neighbours, each as a process or an attack, and the ordinary tenants who wait beside them."""
