"""Replace personal data in texts: e-mail addresses, IP addresses and phone numbers.

The patterns are bounded, so that the time is proportional to the text for any text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network
from types import MappingProxyType
from typing import Final

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_schema.app.config import did_you_mean
from mega_schema.errors import ConfigError

_ATOM: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9]{1,2})"
_IPV4: Final = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
# an address has at most 64 characters before the @ (RFC 5321)
_EMAIL_PATTERN: Final = re.compile(
    rf"\b(?:{_ATOM}|\.(?=[^.@])){{1,64}}(?<=[^.])@(?:(?:{_LABEL}\.){{1,8}}{_LABEL}|\[{_IPV4}\])"
)
# not a part of a longer sequence of numbers, such as a version or an object identifier
_IPV4_PATTERN: Final = re.compile(rf"(?<![\w.]){_IPV4}(?!\w|\.\d)")
_IPV6_PATTERN: Final = re.compile(
    rf"(?<![\w:.])[23][0-9A-Fa-f]{{3}}:(?:[0-9A-Fa-f]{{0,4}}:){{1,6}}(?:{_IPV4}|[0-9A-Fa-f]{{0,4}})(?![\w:])"
)
# the addresses that are assigned to hosts; a larger range would contain words such as C++'s dead::beef
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
# +90 212 555 01 00, (212) 555-0100, 212-555-0100; not a part of a longer number, an identifier or a sum
_PHONE_PATTERN: Final = re.compile(
    r"(?<![\w+.-])(?:\+[1-9](?:[ ./-]?\(?[0-9]{1,4}\)?){2,7}"
    r"|(?:1[ .-])?\([2-9][0-9]{2}\) ?[2-9][0-9]{2}[ .-][0-9]{4}"
    r"|(?:1[ .-])?[2-9][0-9]{2}([.-])[2-9][0-9]{2}\1[0-9]{4})(?![\w+]|[.-][0-9])"
)
_PHONE_DIGITS: Final = range(8, 16)  # of an international number (E.164)

_EXAMPLES: Final = MappingProxyType(
    {
        "email": ("email@example.com", "firstname.lastname@example.org"),
        # ranges for documentation: RFC 5737, RFC 3849; numbers for fiction
        "ipv4": ("192.0.2.1", "198.51.100.1", "203.0.113.1"),
        "ipv6": ("2001:db8::1",),
        "phone": ("+1-202-555-0100",),
    }
)
_TOKENS: Final = MappingProxyType(
    {"email": ("<EMAIL>",), "ipv4": ("<IP>",), "ipv6": ("<IP>",), "phone": ("<PHONE>",)}
)
_STYLES: Final = MappingProxyType({"examples": _EXAMPLES, "tokens": _TOKENS})
_KINDS: Final = MappingProxyType({"emails": ("email",), "ips": ("ipv4", "ipv6"), "phones": ("phone",)})


@dataclass(frozen=True, slots=True)
class PiiStep:
    """Replace e-mail addresses, public IP addresses and phone numbers; count them in the report.

    Attributes:
        kinds: emails, ips, phones. FineWeb replaces emails and ips.
        style: examples writes addresses and numbers that are reserved for examples; tokens writes <EMAIL>,
            <IP> and <PHONE>.
    """

    kinds: tuple[str, ...] = ("emails", "ips", "phones")
    style: str = "examples"

    def start(self) -> RowFunction:
        for name, values, known in (
            ("kinds", self.kinds, list(_KINDS)),
            ("style", (self.style,), list(_STYLES)),
        ):
            for value in values or ("",):
                if value not in known:
                    wanted, hint = " | ".join(known), did_you_mean(value, known)
                    raise ConfigError(
                        f"step pii: {name}", "unknown", found=value or "nothing", wanted=wanted, hint=hint
                    )
        replacements = _STYLES[self.style]
        kinds = [kind for name in _KINDS if name in self.kinds for kind in _KINDS[name]]

        def work(row: Row) -> Verdict:
            text = row.text
            counts = Counter[str]()
            for kind in kinds:
                text, count = replace_pii(text, kind, replacements[kind])
                if count:
                    counts[kind] = count
            return [row.with_values(**{row.key: text}).with_counts(counts)] if counts else [row]

        return work


def replace_pii(text: str, kind: str, replacements: Sequence[str]) -> tuple[str, int]:
    """Replace all addresses or numbers of a kind by the replacements in turn; return the text and a count.

    The first replacement of each text is the first of the list, so that the result depends on the text alone.
    """
    candidates, pattern, is_personal = _DETECTORS[kind]
    if not any(candidate.search(text) for candidate in candidates):
        return text, 0
    count = 0

    def replacement_of(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] in _EXAMPLES[kind] or not is_personal(match[0]):
            return match[0]
        count += 1
        return replacements[(count - 1) % len(replacements)]

    return pattern.sub(replacement_of, text), count


def _is_email(address: str) -> bool:
    return True


def _is_public_ipv4(address: str) -> bool:
    try:
        return IPv4Address(address).is_global
    except AddressValueError:  # zeros at the beginning of a number
        return False


def _is_public_ipv6(address: str) -> bool:
    try:
        parsed = IPv6Address(address)
    except AddressValueError:
        return False
    return parsed in _GLOBAL_UNICAST and parsed.is_global


def _is_phone(number: str) -> bool:
    return not number.startswith("+") or sum(map(str.isdigit, number)) in _PHONE_DIGITS


# Patterns of which one occurs in each text with a match, the pattern, and a check of a match. The first begin
# with a set of characters, which `re` finds several times as fast as a look-behind.
_DETECTORS: Final = MappingProxyType[
    str, tuple[tuple[re.Pattern[str], ...], re.Pattern[str], Callable[[str], bool]]
](
    {
        "email": ((re.compile("@"),), _EMAIL_PATTERN, _is_email),
        "ipv4": ((re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"),), _IPV4_PATTERN, _is_public_ipv4),
        "ipv6": ((re.compile(r"[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]"),), _IPV6_PATTERN, _is_public_ipv6),
        "phone": (
            (re.compile(r"\+[1-9]"), re.compile(r"[0-9]{3}[).-] ?[2-9][0-9]{2}[ .-][0-9]{4}")),
            _PHONE_PATTERN,
            _is_phone,
        ),
    }
)
