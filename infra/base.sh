#!/usr/bin/env bash
# Builds the image raycap-base from Debian's packages, for `make image BASE=raycap-base` where no registry of images can
# be reached. Needs root and debootstrap. The image trusts the certificates that were added to this machine.
set -euo pipefail
root="$(mktemp --directory)"
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python-is-python3 bookworm "$root" >&2
cp --recursive /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
chroot "$root" update-ca-certificates >&2
rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/*.bin "$root"/var/lib/apt/lists/*
bundle=/etc/ssl/certs/ca-certificates.crt  # pip and uv have certificates of their own
tar --directory "$root" --create . \
  | docker import --change "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle" --change 'CMD ["python"]' - raycap-base
