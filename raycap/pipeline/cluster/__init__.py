"""Ray: start it or join a cluster, wait for its resources, watch for stalls."""
