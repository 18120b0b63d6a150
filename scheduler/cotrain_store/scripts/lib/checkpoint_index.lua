-- checkpoint_index: lists of a tenant's checkpoints. A checkpoint is in all lists or in none. Expired ones are removed
-- when the lists are next read.
-- needs: weights_release, ages
local SOON_S = 60 -- maximum difference of the clocks of two hosts

local function member_of(record)
  return record.run .. '/' .. record.kind .. '/' .. record.name
end

local function count_checkpoint(tenant, member, size)
  local sizes = 'cotrain:tenant:' .. tenant .. ':checkpoint_sizes'
  local more = size - tonumber(redis.call('HGET', sizes, member) or 0)
  if tonumber(redis.call('ZINCRBY', 'cotrain:tenants:checkpoint_bytes', more, tenant)) <= 0 then
    redis.call('ZREM', 'cotrain:tenants:checkpoint_bytes', tenant)
  end
end

local function remove_checkpoint(tenant, member)
  count_checkpoint(tenant, member, 0)
  local run, name = string.match(member, '^([^/]*)/(.*)$')
  redis.call('ZREM', 'cotrain:run:' .. run .. ':checkpoints', name)
  redis.call('ZREM', 'cotrain:tenant:' .. tenant .. ':checkpoints', member)
  redis.call('ZREM', 'cotrain:tenant:' .. tenant .. ':expiring', member)
  redis.call('HDEL', 'cotrain:tenant:' .. tenant .. ':checkpoint_sizes', member)
  redis.call('SREM', 'cotrain:published', member)
end

local function remove_expired(tenant)
  local expiring = 'cotrain:tenant:' .. tenant .. ':expiring'
  local soon = tonumber(redis.call('TIME')[1]) + SOON_S
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', expiring, '-inf', soon)) do
    if redis.call('EXISTS', 'cotrain:checkpoint:' .. member) == 0 then
      remove_checkpoint(tenant, member)
    end
  end
end

-- Write and list a record, passed as JSON and decoded. The name may have referred to other weights.
local function write_checkpoint(text, record)
  local member, name, tenant = member_of(record), record.kind .. '/' .. record.name, record.tenant
  local expiring = 'cotrain:tenant:' .. tenant .. ':expiring'
  local before = redis.call('GET', 'cotrain:checkpoint:' .. member)
  redis.call('SET', 'cotrain:checkpoint:' .. member, text)
  if before and cjson.decode(before).weights ~= record.weights then
    release_weights(cjson.decode(before).weights)
  end
  redis.call('ZADD', 'cotrain:run:' .. record.run .. ':checkpoints', record.created_at, name)
  redis.call('ZADD', 'cotrain:tenant:' .. tenant .. ':checkpoints', record.created_at, member)
  count_checkpoint(tenant, member, record.size)
  redis.call('HSET', 'cotrain:tenant:' .. tenant .. ':checkpoint_sizes', member, record.size)
  redis.call(record.public and 'SADD' or 'SREM', 'cotrain:published', member)
  redis.call('SADD', 'cotrain:weights:' .. record.weights .. ':users', 'c:' .. member)
  if record.expires_at == cjson.null then
    redis.call('ZREM', expiring, member)
  else
    redis.call('ZADD', expiring, record.expires_at, member)
    local at_ms = string.format('%.0f', record.expires_at * 1000)
    redis.call('PEXPIREAT', 'cotrain:checkpoint:' .. member, at_ms)
    release_weights(record.weights) -- from now on they are checked until it has expired
  end
end
