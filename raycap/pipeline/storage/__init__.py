"""Files, weights and tables on local disks and S3: paths, atomic writes, mirrors, caches and leases."""
