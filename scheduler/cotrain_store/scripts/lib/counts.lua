-- counts: counts of a pool, in total and in a minute; usage of a tenant in an hour; and its failed requests.
local function add_counters(prefix, counts)
  for name, value in pairs(counts) do
    redis.call('HINCRBYFLOAT', prefix .. 'counters', name, value)
  end
end

local function add_minute(minute, counts, ttl_s)
  for name, value in pairs(counts) do
    redis.call('HINCRBYFLOAT', minute, name, value)
  end
  redis.call('EXPIRE', minute, ttl_s)
end

local function add_usage(usage, field, amount, ttl_s)
  redis.call('HINCRBYFLOAT', usage, field, amount)
  redis.call('EXPIRE', usage, ttl_s)
end

-- Count a failed request, in the minute and in total, and keep its message. The pool's minute has the key `minute`.
-- The encoded failure is `result`.
local function add_failure(minute, tenant, request, result, ttl_s)
  local pool, start = string.match(minute, '{(.*)}:minute:(%d+)$')
  local counts = 'cotrain:failures:' .. start
  local message = cjson.decode(string.sub(result, 2)).error
  local last = math.min(#message, 600)
  -- a cut within a character would store invalid UTF-8
  while last < #message and string.byte(message, last + 1) >= 0x80 and string.byte(message, last + 1) < 0xC0 do
    last = last - 1
  end
  message = string.sub(message, 1, last)
  redis.call('HINCRBY', counts, 'failed|' .. tenant, 1)
  redis.call('EXPIRE', counts, ttl_s)
  redis.call('HINCRBY', 'cotrain:failures:totals', pool .. '|' .. tenant, 1)
  redis.call('HSET', 'cotrain:failures:newest', 'failed|' .. tenant,
    cjson.encode({ at = tonumber(redis.call('TIME')[1]), request = request, message = message }))
  redis.call('EXPIRE', 'cotrain:failures:newest', ttl_s)
end
