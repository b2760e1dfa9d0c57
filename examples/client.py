# SPDX-License-Identifier: Apache-2.0
"""Stream a completion from a server, such as that of examples/serve.sh.

The client needs nothing special for a server with a drafter.

python examples/client.py [--url http://127.0.0.1:8000] [--prompt TEXT]
"""

import argparse

import openai

PROMPT = "def read_lines(path):\n    with open("


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(arguments.prompt, end="", flush=True)
    for chunk in client.completions.create(
        model=model,
        prompt=arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
    ):
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
