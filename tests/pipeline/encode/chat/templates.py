"""Small chat templates that mark answers, one for each way in which families of models write turns."""

from __future__ import annotations

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content if message.content is not none else '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

THINK = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set content = message.content %}
    {%- set reasoning = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- generation %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content.strip() + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""

BARE = """\
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content }}{%- endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""
"""A span ends with the message, in mid-text: the end of the turn is not learned."""

INST = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- endif %}
{%- endfor %}
"""

TURNS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<end_of_turn>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""

BARS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<\uff5cAssistant\uff5c>' }}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
    {%- elif message.role == 'user' %}
        {{- '<\uff5cUser\uff5c>' + message.content }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
"""
"""DeepSeek's: the tokens that begin a turn are not special."""
