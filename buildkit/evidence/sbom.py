"""A software bill of materials of an image, as CycloneDX 1.6 JSON. The same image gives the same bytes.

What is listed: the packages that the image's own databases and metadata name, the recipe's source and the base image
from the labels, and CUDA's libraries from a check's report where one is given. What was seen and not read stands in the
property ``buildkit:unread``, so that nobody takes silence for absence.
"""

from __future__ import annotations

import json
import posixpath
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cyclonedx.model import ExternalReference, ExternalReferenceType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.component_evidence import ComponentEvidence, Occurrence
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_expression, is_supported_id
from packageurl import PackageURL

from buildkit import __version__
from buildkit.build import labels
from buildkit.errors import one_line
from buildkit.evidence.artifact import parse_time
from buildkit.evidence.contents import Contents, read_contents
from buildkit.evidence.packages import Package
from buildkit.image.source import ImageSource
from buildkit.model import Digest, ImageConfig, Reference

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/schema/bom-1.6")
_MAX_OCCURRENCES = 20
_EPOCH = datetime.fromtimestamp(0, UTC)
_ROOT = "image"
_ADDRESS = re.compile(
    r"(?:https?|ssh|git)://[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@/-]*)?", re.ASCII
)
"""A repository's URL, stricter than URLs are: a label may hold anything."""


def make_sbom(
    source: ImageSource,
    *,
    image: Reference | None = None,
    check: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> bytes:
    """The bill of ``source``. ``image`` is where it has been pushed to, by digest; ``check`` a check's JSON.

    Costs one pass over all layers, each read to its verified end. The time in it is that of the commit (the label
    ``created``), else the image's own. Raises ImageError for an image that is corrupt, StorageError.
    """
    contents = read_contents(source, progress=progress)
    # A stream source has its config only after its last layer.
    return render(contents, source.config(), image_id=source.image_id, image=image, check=check)


def render(
    contents: Contents,
    config: ImageConfig,
    *,
    image_id: Digest,
    image: Reference | None = None,
    check: Mapping[str, Any] | None = None,
) -> bytes:
    """The bill as bytes; they depend on the arguments and this package's version alone."""
    identity = image.digest if image is not None and image.digest is not None else image_id
    root = _image(config, identity, image, contents)
    components = [*_packages(contents), *_cuda(check), *_origins(config)]
    unique = {component.bom_ref.value: component for component in components}
    metadata = BomMetaData(
        component=root,
        timestamp=_created(config),
        tools=ToolRepository(
            components=[Component(type=ComponentType.APPLICATION, name="buildkit", version=__version__, bom_ref="tool")]
        ),
    )
    bom = Bom(
        serial_number=uuid.uuid5(_NAMESPACE, str(identity)), version=1, metadata=metadata, components=unique.values()
    )
    bom.register_dependency(root, unique.values())
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    # In one order of members, whatever order the library writes them in.
    return json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _image(config: ImageConfig, identity: Digest, image: Reference | None, contents: Contents) -> Component:
    found = config.labels
    name = image.repository if image is not None else found.get(labels.TITLE) or "image"
    system = contents.system
    properties = [
        Property(name="buildkit:platform", value=str(config.platform)),
        *(Property(name=f"buildkit:label:{k}", value=_text(found[k])) for k in _SHOWN if found.get(k)),
        *(Property(name="buildkit:unread", value=_text(line)) for line in contents.unread),
    ]
    if system.get("PRETTY_NAME"):
        properties.append(Property(name="buildkit:system", value=system["PRETTY_NAME"]))
    purl = None
    if image is not None:
        last = posixpath.basename(image.repository)
        qualifiers = {"repository_url": image.name, "arch": config.platform.architecture}
        purl = _purl("oci", None, last, str(identity), qualifiers)
    return Component(
        type=ComponentType.CONTAINER,
        name=_text(name),
        version=str(identity),
        bom_ref=_ROOT,
        purl=purl,
        licenses=_licenses((found[labels.LICENSES],) if found.get(labels.LICENSES) else ()),
        description=_text(found[labels.DESCRIPTION]) if found.get(labels.DESCRIPTION) else None,
        external_references=_repository(found.get(labels.SOURCE), found.get(labels.REVISION)),
        properties=properties,
    )


_SHOWN = (labels.REVISION, labels.RECIPE, labels.SM, labels.CUDA, labels.DIRTY)


def _packages(contents: Contents) -> Iterator[Component]:
    system = contents.system
    distribution = system.get("ID", "")
    release = f"{distribution}-{system['VERSION_ID']}" if distribution and system.get("VERSION_ID") else distribution
    merged: dict[str, tuple[Package, PackageURL | None, list[str]]] = {}
    for package, listing in contents.packages.items():
        purl = _package_url(package, distribution, release)
        reference = purl.to_string() if purl is not None else f"{package.kind}:{package.name}@{package.version}"
        merged.setdefault(reference, (package, purl, []))[2].extend(listing)
    for reference, (package, purl, paths) in sorted(merged.items(), key=lambda item: item[0]):
        yield Component(
            type=ComponentType.LIBRARY,
            group=package.namespace or None,
            name=package.name,
            version=package.version or None,
            bom_ref=reference,
            purl=purl,
            licenses=_licenses(package.licenses),
            evidence=_found_at(paths),
        )


def _purl(
    kind: str, namespace: str | None, name: str, version: str | None, qualifiers: Mapping[str, str] | None = None
) -> PackageURL | None:
    """None where names are such that there is none."""
    try:
        return PackageURL(kind, namespace, name, version or None, dict(qualifiers) if qualifiers else None)
    except ValueError:
        return None


def _package_url(package: Package, distribution: str, release: str) -> PackageURL | None:
    """purl-spec, the types deb, apk, pypi, npm and cargo."""
    namespace, qualifiers = package.namespace or None, dict(package.qualifiers)
    if package.kind in ("deb", "apk"):
        namespace = distribution or ("debian" if package.kind == "deb" else "alpine")
        if release:
            qualifiers["distro"] = release
    return _purl(package.kind, namespace, package.name, package.version, qualifiers)


def _cuda(check: Mapping[str, Any] | None) -> Iterator[Component]:
    """CUDA's libraries, as ``cudaVersions`` of a check's report has them."""
    entries = check.get("cudaVersions") if check is not None else None
    found: dict[tuple[str, str], list[str]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("component"), str) and entry.get("version"):
            key = (_text(entry["component"]), _text(str(entry["version"])))
            found.setdefault(key, []).append(_text(str(entry.get("where", ""))))
    for (name, version), where in sorted(found.items()):
        yield Component(
            type=ComponentType.LIBRARY,
            group="nvidia",
            name=name,
            version=version,
            bom_ref=f"cuda:{name}@{version}",
            purl=_purl("generic", "nvidia", name, version),
            evidence=_found_at(where),
        )


def _found_at(paths: Sequence[str]) -> ComponentEvidence:
    places = sorted({_text(path) for path in paths if path})[:_MAX_OCCURRENCES]
    return ComponentEvidence(occurrences=[Occurrence(location=path) for path in places])


def _origins(config: ImageConfig) -> Iterator[Component]:
    """What the image was made from: the packaged software's source, and the base image."""
    found = config.labels
    url, revision = found.get(labels.SOURCE_URL), found.get(labels.SOURCE_REVISION)
    if url or revision:
        name = posixpath.basename(_text(url or "").rstrip("/")).removesuffix(".git") or "source"
        version = _text(revision) if revision else None
        address = url if url and _ADDRESS.fullmatch(url) else None
        qualifiers = {"vcs_url": f"git+{address}" + (f"@{version}" if version else "")} if address else None
        yield Component(
            type=ComponentType.APPLICATION,
            name=name,
            version=version,
            bom_ref="source",
            purl=_purl("generic", None, name, version, qualifiers),
            external_references=_repository(url, revision),
            properties=[Property(name="buildkit:role", value="source")],
        )
    base, digest = found.get(labels.BASE_NAME), found.get(labels.BASE_DIGEST)
    if base:
        yield Component(
            type=ComponentType.CONTAINER,
            name=_text(base),
            version=_text(digest) if digest else None,
            bom_ref="base",
            properties=[Property(name="buildkit:role", value="base")],
        )


def _repository(url: str | None, revision: str | None) -> Sequence[ExternalReference]:
    """A VCS reference, where the label's text is an address at all."""
    if not url or not _ADDRESS.fullmatch(url):
        return ()
    comment = f"revision {_text(revision)}" if revision else None
    return (ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url), comment=comment),)


def _licenses(texts: Sequence[str]) -> list[DisjunctiveLicense | LicenseExpression]:
    """SPDX ids and one expression where they are that, names otherwise. CycloneDX allows either one expression or a
    list."""
    cleaned = [_text(text) for text in texts if text.strip()]
    if len(cleaned) == 1 and not is_supported_id(cleaned[0]) and is_expression(cleaned[0]):
        return [LicenseExpression(cleaned[0])]
    return [
        DisjunctiveLicense(id=text) if is_supported_id(text) else DisjunctiveLicense(name=text)
        for text in dict.fromkeys(cleaned)
    ]


def _created(config: ImageConfig) -> datetime:
    own = config.document.get("created")
    return parse_time(config.labels.get(labels.CREATED)) or parse_time(own) or _EPOCH


def _text(text: str) -> str:
    """One line of valid Unicode."""
    return one_line(text, 500).encode("utf-8", "replace").decode()
