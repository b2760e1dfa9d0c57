# SPDX-License-Identifier: Apache-2.0
"""A text of many kinds on which two tokenizers are compared when the user names none.

Long enough that shares are good to about a percent, short enough to cost nothing. Blank lines part
it into documents.
"""

CALIBRATION_TEXT = '''\
The harbour was quiet when the ferry came in. Two men in yellow jackets threw the ropes, and a dog
that belonged to nobody ran up and down the quay, barking at the gulls. "You're early," said the
older man. "We weren't expecting anybody before Tuesday." Nobody answered him.

In 1887 the town council bought 3,400 acres of marshland for $12.50 an acre, drained it within six
years, and built a railway station, a hospital and two schools. By 1931 the population had grown to
48,212; forty years later it was less than half of that. What remained was a cinema, an ironworks,
and an unusually good library whose catalogue (some 61,000 volumes) had never been printed.

Speculative decoding uses a small, fast language model to guess several tokens ahead, and a large
one to check all of the guesses in a single forward pass. Because the check costs about as much as
generating one token, every correct guess is nearly free. The procedure is arranged so that the
distribution of the output does not change at all; only the number of steps does.

First, preheat the oven to 220 °C (425 °F). Whisk three eggs with 150 ml of milk, add a pinch of
salt, then fold in the flour little by little. Don't over-mix: a few lumps are fine! Bake for 25-30
minutes, until the top is golden brown, and let it cool on a rack before slicing.

Q: A train leaves at 9:40 and travels 186 miles at 62 miles per hour. When does it arrive?
A: 186 / 62 = 3 hours, so it arrives at 12:40. The answer is 12:40.

Dear Ms. Lindqvist,

thank you for your message of 14 February. We've looked into the two invoices (no. 2024-0173 and
no. 2024-0188) and found that the second one had been issued twice; we apologise for the mistake and
will refund EUR 89.90 within five working days. Please let us know if anything else is unclear.

Yours sincerely,
J. Abernathy-Okonkwo

```python
import collections
from dataclasses import dataclass, field

@dataclass
class Histogram:
    """Counts of words, most frequent first."""

    counts: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))

    def add(self, line: str, *, lower: bool = True) -> None:
        for word in (line.lower() if lower else line).split():
            self.counts[word.strip(".,;:!?()[]")] += 1

    def top(self, n: int = 10) -> list[tuple[str, int]]:
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:n]

if __name__ == "__main__":
    histogram = Histogram()
    with open("input.txt", encoding="utf-8") as lines:
        for line in lines:
            histogram.add(line)
    for word, count in histogram.top():
        print(f"{count:>8,}  {word}")
```

```c
#include <stdio.h>
#include <stdint.h>

static uint64_t fnv1a(const char *text, size_t length) {
\tuint64_t hash = 0xcbf29ce484222325ULL;
\tfor (size_t i = 0; i < length; i++) {
\t\thash ^= (unsigned char)text[i];
\t\thash *= 0x100000001b3ULL;
\t}
\treturn hash;  /* never zero in practice */
}
```

```javascript
export async function fetchUsers(url, { retries = 3, timeoutMs = 5_000 } = {}) {
  for (let attempt = 1; attempt <= retries; attempt++) {
    const signal = AbortSignal.timeout(timeoutMs);
    const response = await fetch(`${url}?page=${attempt}`, { signal });
    if (response.ok) {
      return (await response.json()).filter((user) => !user.isDeleted && user.age >= 18);
    }
    console.warn(`attempt ${attempt} of ${retries} failed: HTTP ${response.status}`);
  }
  throw new Error("no response");
}
```

```sql
SELECT c.country, COUNT(*) AS orders, ROUND(SUM(o.total), 2) AS revenue
FROM customers AS c JOIN orders AS o ON o.customer_id = c.id
WHERE o.created_at >= '2023-01-01' AND o.status <> 'cancelled'
GROUP BY c.country HAVING COUNT(*) > 100 ORDER BY revenue DESC LIMIT 20;
```

```bash
for file in logs/*.gz; do
  zcat "$file" | grep -E '(ERROR|FATAL)' | awk '{print $1, $NF}' | sort -u
done
```

{"id": 42, "name": "Ünal", "tags": ["a/b", "c-d"], "ratio": -1.25e-3, "ok": true, "next": null}

<!DOCTYPE html>
<html lang="en">
  <head><meta charset="utf-8"><title>Weekly report &mdash; draft</title></head>
  <body>
    <h1 class="page-title">Weekly report</h1>
    <p>See <a href="https://www.example.org/reports/2024-07?id=7&amp;p=2">the archive</a>.</p>
    <ul><li>first</li><li><em>second</em></li></ul>
  </body>
</html>

# Release notes

## Version 2.3.1

* **Fixed**: `parse_args()` no longer raises `KeyError` when `--output-dir` is missing (#1842).
* **Added**: support for *nested* tables.

| name        | size (MiB) | time (s) |
|-------------|-----------:|---------:|
| small       |        117 |     0.84 |
| extra-large |      1,542 |    12.06 |

The roots of $ax^2 + bx + c = 0$ are $x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$, so for $a = 1$,
$b = -5$ and $c = 6$ we get $x_1 = 2$ and $x_2 = 3$; the integral $\\int_0^\\pi \\sin\\theta \\,
d\\theta$ is 2.

Der Zug aus Köln hatte zwölf Minuten Verspätung, weil bei Düren ein Baum über die Gleise gestürzt
war. „Das schaffen wir nie“, sagte sie, „außer wir laufen quer über den Bahnsteig.“

L'été dernier, nous avons loué une petite maison près de la forêt ; les enfants s'y étaient bien
amusés, même s'il n'y avait ni télévision ni réseau. Où irons-nous l'année prochaine ?

Typed on another keyboard, cafe\u0301 and nin\u0303o take two code points where one would do.

El niño preguntó: «¿Por qué brilla la luna?» Nadie le contestó, pero mañana volverá a preguntarlo.

Вечером пошёл снег, и к утру весь двор был белым. Соседка позвонила и спросила, не пойдём ли мы
гулять.

Η βιβλιοθήκη ανοίγει στις εννέα το πρωί και κλείνει στις οκτώ το βράδυ.

图书馆每天早上九点开门，晚上八点关门。如果你想借书，请带上身份证；一次最多可以借十本，期限为三十天。

今日は朝から雨が降っていたので、駅前の喫茶店で本を読みながら友達を待っていました。コーヒーは450円です。

오늘은 아침부터 비가 와서 우산을 가지고 나갔다. 버스가 늦게 와서 회사에 십 분 지각했다.

تفتح المكتبة أبوابها في التاسعة صباحا وتغلق في الثامنة مساء.

पुस्तकालय सुबह नौ बजे खुलता है और रात आठ बजे बंद होता है।

ok so we're meeting at 7 🙂 bring snacks 🍕🥤 and the flag 🏳️‍🌈!! lol 😂😂 see u 👋🏽 @home #friday
'''
