-- usage_add: add to a tenant's usage in an hour.
local function add_usage(usage, field, amount, ttl_s)
  redis.call('HINCRBYFLOAT', usage, field, amount)
  redis.call('EXPIRE', usage, ttl_s)
end
